"""Times one attention layer, index included, against exact attention at the same shape, on one GPU.

    python -m tools.bench.bench_layer --seq-length 131072 524288 --attn-type minfer --out tools/bench/results

What is timed is what training runs: build_index, forward and backward through sparse_ring_attention. Queries
and keys are random: a fixed budget of columns and slashes then gives a known density at any length
(`--slash-share`). The dense baseline is the fastest exact kernel of torch's SDPA. Prints a Markdown table;
with --out also writes CSV and Markdown.
"""

import argparse
import csv
import json
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention
from megatron_mtrain.index import build_index

COLUMNS = ("tokens", "method", "density", "index_ms", "forward_ms", "backward_ms", "total_ms", "speedup",
           "active_tflops", "index_share", "index_mib", "peak_mib")  # fmt: skip


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("bench_layer needs an NVIDIA GPU; none is visible")
    rows = []
    for tokens in args.seq_length:
        dense = dense_row(args, tokens)
        rows.append(dense)
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
    parser.add_argument("--attn-type", nargs="+", default=["minfer"], choices=["minfer"])
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--groups", type=int, default=2, help="key heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--columns", type=int, default=1024, help="fixed budget of minfer columns a head")
    parser.add_argument("--slash-share", type=float, default=0.025, help="slashes a head, per block distance")
    parser.add_argument("--out", type=Path, help="folder for the report")
    return parser.parse_args()


def config_of(args, tokens: int, method: str) -> AttentionConfig:
    """The configuration of a row; minfer gets a pattern file with fixed budgets."""
    slashes = max(1, round(tokens / 128 * args.slash_share))
    entry = ["vertical_and_slash", args.columns, slashes, 1]
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump([{str(head): entry for head in range(args.heads)}], file)
    return AttentionConfig.from_dict(method, {"pattern_config_name": file.name})


def tensors(args, tokens: int):
    torch.manual_seed(tokens)
    sizes = [args.heads, args.groups, args.groups, args.heads]
    return [
        torch.randn(tokens, 1, heads, args.head_size, device="cuda", dtype=torch.bfloat16) for heads in sizes
    ]


def milliseconds(call, tokens: int) -> float:
    """Median time of `call`, in ms; long calls are repeated less."""
    budget = 1000 if tokens <= 262144 else 2000
    return triton.testing.do_bench(call, warmup=budget // 5, rep=budget, return_mode="median")


def dense_row(args, tokens: int) -> dict:
    """Exact attention by the fastest of torch's fused kernels."""
    best = None
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        query, key, value, grad = (x.permute(1, 2, 0, 3).contiguous() for x in tensors(args, tokens))
        leaves = [x.requires_grad_() for x in (query, key, value)]

        def forward(leaves=leaves, backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=True, enable_gqa=True
                )

        try:
            out = forward()
        except RuntimeError:
            continue
        torch.cuda.reset_peak_memory_stats()
        times = [
            milliseconds(forward, tokens),
            milliseconds(lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True), tokens),  # noqa: B023
        ]
        row = {"tokens": tokens, "method": f"dense ({backend.name.lower()})", "density": 1.0, "index_ms": 0.0}
        row |= {"forward_ms": times[0], "backward_ms": times[1], "total_ms": sum(times), "speedup": 1.0}
        flops = 3.5 * 4 * args.head_size * args.heads * tokens * (tokens + 1) / 2
        row |= {"active_tflops": flops / sum(times) / 1e9, "index_share": 0.0, "index_mib": 0.0}
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        if best is None or row["total_ms"] < best["total_ms"]:
            best = row
        del out
    return best


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
        pairs = attended_pairs(tiles)
        del tiles

        def build():
            build_index(config, query, key, layout, [], 0).tiles(0, by_key=True)

        index_ms = milliseconds(build, tokens)
    del index
    torch.cuda.reset_peak_memory_stats()

    def forward():
        return sparse_ring_attention(*leaves, config=config, layout=layout, rings=[])

    def everything():
        torch.autograd.grad(forward(), leaves, grad)

    everything()
    peak = torch.cuda.max_memory_allocated()
    forward_ms, total_ms = milliseconds(forward, tokens), milliseconds(everything, tokens)
    flops = 3.5 * 4 * args.head_size * pairs
    return {
        "tokens": tokens, "method": method, "density": pairs / (args.heads * tokens * (tokens + 1) / 2),
        "index_ms": index_ms, "forward_ms": forward_ms, "backward_ms": total_ms - forward_ms,
        "total_ms": total_ms, "speedup": dense_ms / total_ms, "active_tflops": flops / total_ms / 1e9,
        "index_share": index_ms / total_ms,
        "index_mib": index_bytes / 2**20, "peak_mib": peak / 2**20,
    }  # fmt: skip


def attended_pairs(tiles) -> int:
    """Attended (query, key) pairs over all heads, counted from the lists; the diagonal tile counts half."""
    size = tiles.block_size
    whole = int(tiles.block_count.sum()) * size * size
    diagonal = tiles.block_count.numel() * size * (size - 1) // 2 if tiles.diagonal else 0
    seen = 0
    if tiles.columns is not None:
        words = tiles.columns.visible
        for bit in range(32):
            seen += int(((words >> bit) & 1).sum())
    return whole - diagonal + seen * size


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
