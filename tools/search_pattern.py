"""Find the minfer budgets of every head of a Qwen model: the cheapest that keep a share of its attention.

    python tools/search_pattern.py --hf Qwen2.5-3B --text books/*.txt --seq-length 131072
        --rope-scaling yarn:4 --recall 0.9 --device cuda --out patterns/Qwen2.5_3B_fixed_0.90.json

Runs the model with exact attention on calibration text, a layer in memory at a time, and measures for every
head and every budget of a grid which share of the exact softmax of sampled query rows minfer's selection
keeps. Writes the pattern file, and beside it a report as .report.md and .report.json. Train with it:
`pattern_config_name: PATH` in the YAML of --train-attn-config, with the same last_q, sink_tokens,
local_window and block_size as here.

Fixed budgets are numbers of columns and slashes, so search at the length that you will train at. Flex budgets
([share, cap] of the probe's mass) follow the length by themselves.
"""

import argparse
import json
import logging
import shlex
import sys
import time
import warnings
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools.data.files import DataError, write_atomic

SHARES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hf", required=True, type=Path, metavar="DIR", help="Hugging Face folder of the model")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="calibration text, a document each"
    )
    text.add_argument("--data", type=Path, metavar="PREFIX", help="indexed dataset of the model's tokenizer")
    add("--out", required=True, type=Path, metavar="FILE.json", help="pattern file to write")
    add("--kind", choices=["fixed", "flex"], default="fixed", help="of budgets (%(default)s)")
    add("--recall", type=float, default=0.9, help="share of the attention to keep (%(default)s)")
    add("--seq-length", type=int, default=32768, help="tokens of a sample (%(default)s)")
    add("--samples", type=int, default=4, help="sequences of text (%(default)s)")
    add("--rows", type=int, default=256, help="query rows of a sample that are measured (%(default)s)")
    add("--vertical", type=int, nargs="+", help="fixed: columns to try (0, 16, 32, ... all)")
    add("--slash", type=int, nargs="+", help="fixed: slashes to try (0, 4, 8, ... all)")
    add("--shares", type=float, nargs="+", default=SHARES, help="flex: shares of the probe's mass to try")
    add("--cap", type=int, default=4096, help="flex: most columns, and most slashes (%(default)s)")
    add("--rope-scaling", metavar="yarn:FACTOR", help="extended context, as in pretrain_qwen.py")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ... (%(default)s)")
    add("--dtype", choices=["fp32", "bf16"], help="of the model (bf16 on a GPU, else fp32)")
    add("--seed", type=int, default=0, help="of the choice of text and rows (%(default)s)")
    for name, default in (("last-q", 64), ("sink-tokens", 30), ("local-window", 100), ("block-size", 128)):
        add(f"--{name}", type=int, default=default, help="as in the YAML (%(default)s)")
    return parser.parse_args(words)


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be searched or written, before the model is read."""
    if not 0 < args.recall <= 1:
        raise ValueError(f"--recall {args.recall} must be above 0 and at most 1, such as 0.9")
    for name, least in (("seq_length", 1), ("samples", 1), ("rows", 1), ("cap", 0), ("last_q", 1),
                        ("sink_tokens", 0), ("local_window", 0), ("block_size", 1)):  # fmt: skip
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {least}")
    if args.seq_length % args.block_size:
        nearest = max(args.seq_length // args.block_size, 1) * args.block_size
        raise ValueError(
            f"--seq-length {args.seq_length} is not a multiple of --block-size {args.block_size}; "
            f"give {nearest}"
        )
    if any(not 0 <= share <= 1 for share in args.shares):
        raise ValueError(f"--shares {args.shares} must all be from 0 to 1")
    if any(budget < 0 for budget in [*(args.vertical or []), *(args.slash or [])]):
        raise ValueError("--vertical and --slash must be numbers of columns and slashes, 0 or more")
    if args.out.suffix != ".json":
        raise ValueError(f"--out {args.out} must end in .json, as pattern files do")
    if not args.out.parent.is_dir():
        raise ValueError(f"--out: {args.out.parent} does not exist; make it, or choose another folder")


def run(args: argparse.Namespace) -> dict:
    """Searches, writes the three files and returns the report. Raises ValueError and DataError."""
    check(args)
    import torch  # seconds to import: what is wrong at a glance is said before

    from tools.data import sequences
    from tools.pattern.qwen_layers import QwenLayers
    from tools.pattern.report import markdown, summary

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: there is no GPU here; use --device cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}
    default = "bf16" if args.device.startswith("cuda") else "fp32"
    model = QwenLayers(args.hf, args.device, dtype[args.dtype or default], args.rope_scaling)
    source = {"length": args.seq_length, "count": args.samples, "seed": args.seed}
    if args.data:
        samples = sequences.from_indexed(args.data, **source)
    else:
        samples = sequences.from_files(args.text, str(args.hf), **source)
    largest = max(int(sample.max()) for sample in samples)
    if largest >= model.shape.vocab_size:
        raise ValueError(
            f"the calibration text has token {largest}; the model's vocabulary ends at "
            f"{model.shape.vocab_size - 1}. Give text of its own tokenizer"
        )
    found = summary(search(args, model, samples), args.recall)
    entries = [{} for _ in found["layers"]]
    name = {"fixed": "vertical_and_slash", "flex": "flex_vertical_and_slash"}[args.kind]
    for head in found["heads"]:
        entry = [name, head["vertical"], head["slash"], round(head["recall"], 6)]
        entries[head["layer"]][str(head["head"])] = entry
    command = shlex.join(["python", "tools/search_pattern.py", *sys.argv[1:]])
    report = {"command": command, **found}
    write_atomic(args.out.with_suffix(".report.md"), markdown(found, str(args.hf), command).encode())
    write_atomic(args.out.with_suffix(".report.json"), (json.dumps(report, indent=1) + "\n").encode())
    write_atomic(args.out, (json.dumps(entries, indent=1) + "\n").encode())
    return report


def search(args: argparse.Namespace, model, samples: list) -> list:
    """What every head gets, as a list of report.Head in the order of layers and heads."""
    import torch

    from tools.pattern.budgets import Measured, Settings, choose, measure, sample_rows
    from tools.pattern.report import Head

    vertical, slash = axes(args)
    settings = Settings(args.last_q, args.sink_tokens, args.local_window, args.block_size)
    causal = args.seq_length * (args.seq_length + 1) / 2
    heads, of_layer, begin = [], [], time.monotonic()
    for layer, sample, query, key in model.run(samples):
        rows = sample_rows(args.seq_length, args.rows, args.seed + sample)
        of_layer.append(measure(query, key, rows, vertical, slash, settings))
        if len(of_layer) < len(samples):
            continue
        kept, pairs = (torch.stack(tensors) for tensors in zip(*of_layer, strict=True))
        mean = Measured(kept.mean(0), pairs.mean(0))
        of_layer = []
        for head, (v, s) in enumerate(zip(*choose(mean, args.recall), strict=True)):
            seen, cost = kept[:, head, v, s], float(mean.pairs[head, v, s])
            budget = vertical.entry(int(v)), slash.entry(int(s))
            heads.append(
                Head(layer, head, *budget, float(seen.mean()), float(seen.min()), cost, cost / causal)
            )
        _tell(layer, model.shape.num_layers, heads, begin)
    return heads


def axes(args: argparse.Namespace) -> tuple:
    """The grid of columns and of slashes."""
    from tools.pattern.budgets import fixed_axis, flex_axis

    if args.kind == "flex":
        return (flex_axis(args.shares, args.cap),) * 2
    return tuple(
        fixed_axis(given or [0, *_doubling(first, args.seq_length), args.seq_length])
        for given, first in ((args.vertical, 16), (args.slash, 4))
    )


def _doubling(first: int, end: int) -> list[int]:
    return [first << step for step in range(end.bit_length()) if first << step < end]


def _tell(layer: int, layers: int, heads: list, begin: float) -> None:
    """A line of progress on standard error after each layer."""
    mine = [head for head in heads if head.layer == layer]
    recall, density = (sum(getattr(h, name) for h in mine) / len(mine) for name in ("recall", "density"))
    left = int((time.monotonic() - begin) / (layer + 1) * (layers - layer - 1))
    clock = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    sys.stderr.write(
        f"  layer {layer + 1} of {layers}: recall {recall:.4f}, density {density:.2%}; {clock} left\n"
    )


def main() -> None:
    """Runs the command line; what the user can mend ends in one line and exit code 1."""
    args = parse_arguments()
    logging.disable(logging.WARNING)  # of libraries, about GPUs and fused kernels that are not there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run(args)
    except (ValueError, OSError, DataError) as error:
        sys.exit(f"search_pattern: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("search_pattern: interrupted; nothing is written")
    print(
        f"{args.out}: {len(found['heads'])} heads keep {found['recall']:.2%} at {found['density']:.2%} of "
        f"the causal pairs; {found['heads_below']} below {args.recall:.2%}.\n"
        f"Train with `pattern_config_name: {args.out}` in the YAML of --train-attn-config"
    )


if __name__ == "__main__":
    main()
