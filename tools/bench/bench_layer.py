"""Times one attention layer, index included, against exact attention at the same shape, on one GPU.

    python -m tools.bench.bench_layer --seq-length 131072 524288 --attn-type minfer --out tools/bench/results

What is timed is what training runs: build_index, forward and backward through sparse_ring_attention. Queries
and keys are random, and a share of the key blocks (`--hot-share`) has a direction in common with all queries,
which gives those blocks most of the probability, as sinks and heavy hitters have it in real layers. minfer
gets fixed budgets (`--columns`, `--slash-share`), so its density is known at any length; moba and xattn
choose by themselves. The dense baseline is the fastest exact kernel of torch's SDPA. Prints a Markdown table;
with --out also writes CSV and Markdown.
"""

import argparse
import csv
import json
import platform
import sys
import tempfile
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention
from megatron_mtrain.index import build_index
from megatron_mtrain.kernels.pairs import attended_pairs

METHODS = ("minfer", "moba", "xattn")
HOT_GAIN = 8.0  # scaled score that a hot block has on top: e**8 times the weight of a cold one
COLUMNS = ("tokens", "method", "density", "index_ms", "forward_ms", "backward_ms", "total_ms", "speedup",
           "active_tflops", "index_share", "index_mib", "peak_mib")  # fmt: skip


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("bench_layer needs an NVIDIA GPU; none is visible")
    rows, kernels = [], (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    for tokens in sorted(args.seq_length):
        timed = {kernel: row for kernel in kernels if (row := dense_row(args, tokens, kernel))}
        # The winner at the shortest length is the baseline of the longer ones.
        kernels = [min(timed, key=lambda kernel: timed[kernel]["total_ms"])]  # noqa: B023
        dense = timed[kernels[0]]
        rows.append(dense)
        sys.stderr.write(f"{dense}\n")
        for method in args.attn_type:
            rows.append(method_row(args, tokens, method, dense["total_ms"]))
            sys.stderr.write(f"{rows[-1]}\n")
    report = markdown(args, rows)
    print(report)
    if args.out:
        stem = args.out / f"{date.today()}-layer"
        stem.with_suffix(".md").write_text(report)
        with stem.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-length", type=int, nargs="+", default=[131072], help="tokens")
    parser.add_argument("--attn-type", nargs="+", default=["minfer"], choices=METHODS)
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--groups", type=int, default=2, help="key heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--columns", type=int, default=1024, help="fixed budget of minfer columns a head")
    parser.add_argument("--slash-share", type=float, default=0.025, help="slashes a head, per block distance")
    parser.add_argument("--moba", type=int, nargs=2, default=[4096, 12], help="chunk size and top k")
    parser.add_argument("--threshold", type=float, default=0.9, help="share that xattn's blocks reach")
    parser.add_argument("--hot-share", type=float, default=0.05, help="key blocks that all queries look at")
    parser.add_argument("--out", type=Path, help="folder for the report")
    return parser.parse_args()


def config_of(args, tokens: int, method: str) -> AttentionConfig:
    """The configuration of a row; minfer gets a pattern file with fixed budgets."""
    if method == "moba":
        return AttentionConfig.from_dict(method, {"moba_chunk_size": args.moba[0], "moba_topk": args.moba[1]})
    if method == "xattn":
        return AttentionConfig.from_dict(method, {"stride": 16, "threshold": args.threshold})
    slashes = max(1, round(tokens / 128 * args.slash_share))
    entry = ["vertical_and_slash", args.columns, slashes, 1]
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump([{str(head): entry for head in range(args.heads)}], file)
    return AttentionConfig.from_dict(method, {"pattern_config_name": file.name})


def tensors(args, tokens: int):
    """query, key, value, grad_out on the GPU, bf16 [tokens, 1, heads, head size], see above."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    sizes = [args.heads, args.groups, args.groups, args.heads]
    query, key, value, grad = (draw(tokens, 1, heads, args.head_size) for heads in sizes)
    shared = torch.nn.functional.normalize(draw(args.groups, args.head_size).float(), dim=-1)
    shared *= HOT_GAIN**0.5 * args.head_size**0.25
    query += shared.repeat_interleave(args.heads // args.groups, 0).to(query.dtype)
    blocks = tokens // 128
    for group in range(args.groups):
        hot = torch.randperm(blocks, device="cuda", generator=generator)[: round(blocks * args.hot_share)]
        key.view(blocks, 128, args.groups, args.head_size)[hot, :, group] += shared[group].to(key.dtype)
    return query, key, value, grad


def milliseconds(call) -> float:
    """Median time of `call` in ms, over as many calls as take about a second, two at least."""
    times = [_timed(call), _timed(call)]  # the first one compiles
    repeats = min(50, max(2, int(1000 / times[1])))
    return median(_timed(call) for _ in range(repeats))


def _timed(call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def dense_row(args, tokens: int, kernel: SDPBackend) -> dict | None:
    """Exact attention by one of torch's fused kernels; None where it cannot run."""
    query, key, value, grad = (x.permute(1, 2, 0, 3).contiguous() for x in tensors(args, tokens))
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def forward():
        with sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    try:
        out = forward()
    except RuntimeError:
        return None
    torch.cuda.reset_peak_memory_stats()
    forward_ms = milliseconds(forward)
    backward_ms = milliseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
    total_ms = forward_ms + backward_ms
    flops = 3.5 * 4 * args.head_size * args.heads * tokens * (tokens + 1) / 2
    return {
        "tokens": tokens, "method": f"dense ({kernel.name.lower()})", "density": 1.0, "index_ms": 0.0,
        "forward_ms": forward_ms, "backward_ms": backward_ms, "total_ms": total_ms, "speedup": 1.0,
        "active_tflops": flops / total_ms / 1e9, "index_share": 0.0, "index_mib": 0.0,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
    }  # fmt: skip


def method_row(args, tokens: int, method: str, dense_ms: float) -> dict:
    """One sparse method: index, forward, backward, and what they cost."""
    config = config_of(args, tokens, method)
    layout = make_layout(config.layout, tokens, 1, config.block_size)
    query, key, value, grad = tensors(args, tokens)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with torch.no_grad():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        index = build_index(config, query, key, layout, [], 0)
        tiles = index.tiles(0, by_key=True)
        torch.cuda.synchronize()
        index_bytes = torch.cuda.max_memory_allocated() - before
        pairs = int(attended_pairs(tiles).sum())
        del tiles

        def build():
            build_index(config, query, key, layout, [], 0).tiles(0, by_key=True)

        index_ms = milliseconds(build)
    del index
    torch.cuda.reset_peak_memory_stats()

    def forward():
        return sparse_ring_attention(*leaves, config=config, layout=layout, rings=[])

    def everything():
        torch.autograd.grad(forward(), leaves, grad)

    everything()
    peak = torch.cuda.max_memory_allocated()
    forward_ms, total_ms = milliseconds(forward), milliseconds(everything)
    flops = 3.5 * 4 * args.head_size * pairs
    return {
        "tokens": tokens, "method": method, "density": pairs / (args.heads * tokens * (tokens + 1) / 2),
        "index_ms": index_ms, "forward_ms": forward_ms, "backward_ms": total_ms - forward_ms,
        "total_ms": total_ms, "speedup": dense_ms / total_ms, "active_tflops": flops / total_ms / 1e9,
        "index_share": index_ms / total_ms,
        "index_mib": index_bytes / 2**20, "peak_mib": peak / 2**20,
    }  # fmt: skip


def markdown(args, rows: list[dict]) -> str:
    """The report: hardware, versions, command, table."""
    lines = [
        f"# One attention layer, {date.today()}",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"Python {platform.python_version()}; bf16, batch 1, {args.heads} query / {args.groups} key heads, "
        f"d {args.head_size}. Medians.",
        "",
        f"`python -m tools.bench.bench_layer {' '.join(sys.argv[1:])}`",
        "",
        "total = index + forward + backward, timed together; index_ms is the index timed alone with its "
        "lists in both directions. Active TFLOP/s counts attended pairs only. speedup is against the dense "
        "row of the same length.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        cells = [f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
