"""Times whole training steps: tokens a second, utilisation, memory, and what the time goes to.

    python -m tools.bench.bench_train --model qwen2.5-3b --seq-length 65536 131072 --attn-type dense minfer
        --out tools/bench/results [-- flags of pretrain_qwen.py for all rows]

Every row is a run of pretrain_qwen.py of its own (measured_run.py), on `--gpus` processes, with Megatron's
mock data, so weights and tokens are random: attention is nearly uniform, and methods that choose by mass take
all they may. minfer therefore gets fixed budgets (`--budget`), so its density is known; to measure a real
model, give `--config` and `-- --load CHECKPOINT --data-path DATA`. A run that fails, as out of memory, is
a row that says so; the others go on. Prints a Markdown table; with --out also writes it and JSON.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from megatron_mtrain.config import ATTN_TYPES
from megatron_mtrain.presets import model_shape
from tools.bench.step_parts import PARTS

FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
SHIPPED = {"moba": "moba_4096_12", "xattn": "xattn_0.90"}
COLUMNS = ("tokens", "method", "density", "gpus", "step_ms", "step_ms_20", "step_ms_80", "speedup",
           "tokens_per_s", "mfu", "mfu_dense", "light_ms", "peak_gib", "predicted_gib",
           *(f"{part}_ms" for part in PARTS))  # fmt: skip
LEGEND = """\
step_ms is the median, with the 20 % and 80 % quantiles; speedup is over the dense row of the same length. mfu
counts the operations of attended pairs, mfu_dense those of exact attention; neither counts recomputation.
light_ms is the time that the former take at the data sheet's rate. predicted_gib is tools/plan/memory.py. The
parts come from other steps than step_ms, on rank 0: attention is without its index and the waiting for the
ring (communication, with the reduction of gradients); projections are the linear layers before and after
attention."""


def main() -> None:
    args = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in sorted(args.seq_length):
            for method in args.attn_type:
                rows.append(measure(args, tokens, method, Path(folder)))
                sys.stderr.write(f"{rows[-1]}\n")
    add_speedups(rows)
    text = markdown(args, rows)
    print(text)
    if args.out:
        stem = args.out / f"{date.today()}-train"
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="preset such as qwen2.5-3b, or a Hugging Face folder")
    parser.add_argument("--seq-length", type=int, nargs="+", default=[65536], help="tokens")
    parser.add_argument("--attn-type", nargs="+", default=["dense", "minfer"], choices=ATTN_TYPES)
    parser.add_argument("--gpus", type=int, default=1, help="processes; give parallel sizes after --")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--recompute", choices=["full", "none"], default="full")
    parser.add_argument("--budget", type=float, nargs=2, default=[1024, 0.025], metavar=("COLUMNS", "SHARE"),
                        help="minfer: columns a head, and share of block distances")  # fmt: skip
    parser.add_argument("--config", nargs="*", default=[], metavar="TYPE=FILE",
                        help="--train-attn-config of a type")  # fmt: skip
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one row")
    parser.add_argument("--out", type=Path, help="folder for the report")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="for pretrain_qwen.py; they win")
    return parser.parse_args()


def measure(args, tokens: int, method: str, folder: Path) -> dict:
    """One row, measured in processes of its own; with `error` in it when they fail."""
    out = folder / f"{tokens}-{method}.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
    run = [
        "-m",
        "tools.bench.measured_run",
        str(out),
        str(args.steps),
        *run_flags(args, tokens, method, folder),
    ]
    command = [sys.executable, *(launch if args.gpus > 1 else []), *run]
    failed = {"tokens": tokens, "method": method, "gpus": args.gpus}
    root = Path(__file__).parents[2]
    log = folder / "log"
    try:
        with log.open("w") as file:
            subprocess.run(
                command,
                cwd=root,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=args.timeout,
                env=environment(),
            )
    except subprocess.TimeoutExpired:
        return failed | {"error": f"no result in {args.timeout} s"}
    return json.loads(out.read_text()) if out.is_file() else failed | {"error": reason(log.read_text())}


def environment() -> dict[str, str]:
    """That of this process; segments that grow, since steps of long sequences break memory into pieces."""
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}


def reason(log: str) -> str:
    """What ended a run, in a few words."""
    if "OutOfMemoryError" in log:
        return "out of memory"
    lines = [line for line in log.splitlines() if "rror" in line] or log.splitlines() or ["no output"]
    return lines[-1][-200:]


def run_flags(args, tokens: int, method: str, folder: Path) -> list[str]:
    """Flags of pretrain_qwen.py for a row."""
    given = dict(pair.split("=", 1) for pair in args.config)
    config = given.get(method) or SHIPPED.get(method)
    if config is None and method == "minfer":
        config = str(fixed_budgets(args, tokens, folder))
    flags = f"""
        --model {args.model} --seq-length {tokens} --attn-type {method} --tokenizer-type NullTokenizer
        --bf16 --use-distributed-optimizer --lr 1e-5 --lr-decay-style constant --weight-decay 0
        --eval-iters 0 --log-interval 1 --no-log-attention --num-workers 1 --split 100,0,0
    """.split()
    if "--data-path" not in args.flags:
        flags.append("--mock-data")
    flags += ["--train-attn-config", config] if config else []
    return [*flags, *(FULL if args.recompute == "full" else []), *args.flags]


def fixed_budgets(args, tokens: int, folder: Path) -> Path:
    """A minfer configuration with the same budget in every head of the model."""
    shape, (columns, share) = model_shape(args.model), args.budget
    entry = ["vertical_and_slash", int(columns), max(1, round(tokens / 128 * share)), 1.0]
    pattern = folder / "pattern.json"
    pattern.write_text(json.dumps([{str(head): entry for head in range(shape.num_heads)}] * shape.num_layers))
    config = folder / "minfer.yaml"
    config.write_text(f"pattern_config_name: {pattern}\n")
    return config


def add_speedups(rows: list[dict]) -> None:
    """Adds `speedup` over the exact attention of the same length, where both ran."""
    exact = {row["tokens"]: row["step_ms"] for row in rows if row["method"] == "dense" and "step_ms" in row}
    for row in rows:
        if "step_ms" in row and row["tokens"] in exact:
            row["speedup"] = exact[row["tokens"]] / row["step_ms"]


def markdown(args, rows: list[dict]) -> str:
    """The report: hardware, versions, command, table."""
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()})"
    command = f"python -m tools.bench.bench_train {' '.join(sys.argv[1:])}"
    lines = [f"# Training steps of {args.model}, {date.today()}", ""]
    lines += [
        f"{args.gpus} x {device}, torch {torch.__version__}, Python {platform.python_version()}; bf16.",
        "",
    ]
    lines += [f"`{command}`", "", LEGEND, "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        if "error" in row:
            lines.append(
                f"| {row['tokens']} | {row['method']} | {row['error']} |" + " |" * (len(COLUMNS) - 3)
            )
            continue
        lines.append(f"| {' | '.join(cell(row.get(name)) for name in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def cell(value) -> str:
    """A number with four digits; nothing for what is not known."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
