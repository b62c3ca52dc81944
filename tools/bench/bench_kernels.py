"""Times the kernels of one ring step on minfer masks, beside the fastest dense kernel, and checks them first.

    python -m tools.bench.bench_kernels --out tools/bench/results/2026-12-01-kernels

writes <out>.csv and <out>.md. The masks are sets of slashes (block distances) and columns per query head:
distances 0 and 1, further ones spread over the sequence until the wanted density is reached, and columns at
random positions behind a sink of 30. Work is counted from the lists: 4 * d operations for an attended pair in
the forward, 2.5 times that in the backward. A failed check means no table.

Legend: b batch (1), s tokens, h query heads, g key heads, d head size, m blocks, c column slots.
"""

import argparse
import csv
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_mtrain.kernels import block_sparse, reference, triton_backend, vertical
from megatron_mtrain.kernels.pairs import attended_pairs
from megatron_mtrain.kernels.tiles import Columns, Tiles

BLOCK, SINK = 128, 30
# tokens, columns, density of all attended pairs: a slash-only mask, then the two masks whose times the public
# reference is known for (101.8 ms and 225 ms forward + backward at 131072 tokens, 16 query and 2 key heads)
CASES = ((131072, 0, 0.056), (131072, 1024, 0.083), (131072, 4096, 0.186), (524288, 1024, 0.05))
REFERENCE_MS = {(131072, 1024): 101.8, (131072, 4096): 225.0}


@dataclass(frozen=True)
class Shape:
    heads: int = 16
    key_heads: int = 2
    head_dim: int = 128


def slash_bitmaps(tokens: int, columns: int, density: float, heads: int, generator) -> torch.Tensor:
    """Block distances that are on, bool [h, m]: with the columns, `density` of the causal pairs."""
    m = tokens // BLOCK
    pairs = density * tokens * (tokens + 1) / 2
    left = pairs - columns * tokens / 2 * (1 - density)
    bitmaps = torch.zeros(heads, m, dtype=torch.bool)
    for bitmap in bitmaps:
        order = torch.cat((torch.tensor([0, 1]), torch.randperm(m - 2, generator=generator) + 2))
        reached = ((m - order) * BLOCK * BLOCK).cumsum(0)
        bitmap[order[: max(2, int((reached <= left).sum()))]] = True
    return bitmaps


def make_tiles(tokens: int, columns: int, bitmaps: torch.Tensor, groups: int, generator, device) -> Tiles:
    """The Tiles of one step at W = 1 with both lists, from the bitmaps; heads one by one to bound memory."""
    m, heads = tokens // BLOCK, len(bitmaps)
    rows = torch.arange(m, device=device)
    distance = rows[:, None] - rows
    count = torch.empty(1, heads, m, dtype=torch.int32, device=device)
    index = torch.empty(1, heads, m, m, dtype=torch.int32, device=device)
    by_key = torch.empty(1, groups, m, heads // groups, m, dtype=torch.bool, device=device)
    made = [
        torch.empty(1, heads, *shape, dtype=torch.int32, device=device)
        for shape in _column_shapes(m, columns)
    ]
    for head, bitmap in enumerate(bitmaps.to(device)):
        mask = bitmap[distance.clamp(min=0)] & (distance >= 0)
        count[0, head], index[0, head] = mask.sum(-1), torch.argsort(~mask, dim=-1, stable=True)
        by_key[0, head // (heads // groups), :, head % (heads // groups)] = mask.T
        if columns:
            at = torch.randperm(tokens - SINK, generator=generator)[: columns - SINK].to(device) + SINK
            at = torch.cat((torch.arange(SINK, device=device), at)).sort().values
            earlier = at // BLOCK < rows[:, None]
            seen = earlier & ~mask[:, at // BLOCK]
            parts = at, torch.tensor(columns), earlier.sum(-1), reference.pack_bits(seen)
            for into, part in zip(made, parts, strict=True):
                into[0, head] = part
    lists = Tiles(count, index, True, BLOCK, Columns(*made) if columns else None)
    key_count, key_index = _compact(by_key.flatten(-2))
    return lists._replace(key_count=key_count, key_index=key_index)


def _column_shapes(m: int, columns: int):
    return ((columns,), (), (m,), (m, columns // 32))


def _compact(mask):
    """Lists of the set bits of bool [b, g, n, e], key blocks a few at a time."""
    index = torch.empty(mask.shape, dtype=torch.int32, device=mask.device)
    for first in range(0, mask.shape[2], 256):
        index[:, :, first : first + 256] = torch.argsort(
            ~mask[:, :, first : first + 256], dim=-1, stable=True
        )
    return mask.sum(-1, dtype=torch.int32), index


def make_inputs(tokens: int, shape: Shape, generator) -> list[torch.Tensor]:
    """query, key, value and grad_out, bfloat16, normal."""
    heads = (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    return [
        torch.randn(
            tokens, 1, h, shape.head_dim, device=generator.device, dtype=torch.bfloat16, generator=generator
        )
        for h in heads
    ]


def check(shape: Shape, columns: int = 256, tokens: int = 2048) -> dict[str, tuple[float, float]]:
    """Relative errors against float64, of the kernels and of bf16 SDPA with the same mask, and bitwise
    repetition.

    Raises AssertionError when an error is more than 1.5 times that of SDPA, or two runs differ in a bit.
    """
    host, card = torch.Generator().manual_seed(11), torch.Generator("cuda").manual_seed(12)
    bitmaps = slash_bitmaps(tokens, columns, 0.5, shape.heads, host)
    tiles = make_tiles(tokens, columns, bitmaps, shape.key_heads, host, "cuda")
    query, key, value, grad_out = make_inputs(tokens, shape, card)
    scale = shape.head_dim**-0.5

    def ours():
        out, lse = triton_backend.attend(query, key, value, tiles, scale)
        return [out, *triton_backend.attend_backward(grad_out, query, key, value, out, lse, tiles, scale)]

    first, second = ours(), ours()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "two runs differ"
    wide = [x.double() for x in (query, key, value, grad_out)]
    out, lse = reference.attend(*wide[:3], tiles, scale)
    truth = [out, *reference.attend_backward(wide[3], *wide[:3], out, lse, tiles, scale)]
    mask = reference.token_mask(tiles, slice(0, tokens // BLOCK), reference.block_mask(tiles))
    plain = _sdpa_with_mask(query, key, value, grad_out, mask, scale)
    errors = {}
    for name, mine, theirs, exact in zip(("out", "dq", "dk", "dv"), first, plain, truth, strict=True):
        errors[name] = tuple(float((x.double() - exact).norm() / exact.norm()) for x in (mine, theirs))
        assert errors[name][0] <= 1.5 * errors[name][1], f"{name}: {errors[name]}"
    return errors


def _sdpa_with_mask(query, key, value, grad_out, mask, scale):
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    group = query.shape[2] // key.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def milliseconds(run, budget_ms: int = 400) -> tuple[float, float, float]:
    """Median, 20 and 80 % quantile of the time of `run`: after one run, `budget_ms` of them, at least 2."""

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    run()
    count = max(2, min(50, int(budget_ms / once())))
    times = torch.tensor([once() for _ in range(count)])
    return tuple(torch.quantile(times, torch.tensor([0.5, 0.2, 0.8])).tolist())


def matrix_rate() -> float:
    """TFLOP/s of a bfloat16 matrix product of 8192 x 8192 x 8192 on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b)[0] / 1e9


def dense(tokens: int, shape: Shape) -> dict[str, dict]:
    """Quantiles of forward and backward of the dense causal kernels; only cuDNN past 131072 tokens."""
    query, key, value, grad_out = (
        x.permute(1, 2, 0, 3).contiguous()
        for x in make_inputs(tokens, shape, torch.Generator("cuda").manual_seed(1))
    )
    key, value = (x.repeat_interleave(shape.heads // shape.key_heads, 1) for x in (key, value))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
    times = {}
    for name in ("cuDNN",) if tokens > 131072 else backends:
        with sdpa_kernel(backends[name]):

            def forward():
                return F.scaled_dot_product_attention(*leaves, is_causal=True)

            out = forward()
            times[f"dense, {name} (torch SDPA)"] = {
                "forward": milliseconds(forward),
                "backward": milliseconds(
                    lambda out=out: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
                ),
            }
    return times


def sparse(tokens: int, columns: int, density: float, shape: Shape):
    """(tiles, quantiles by kernel, GiB at the peak) of a mask; a backward includes delta and gathering."""
    host, card = torch.Generator().manual_seed(tokens + columns), torch.Generator("cuda").manual_seed(tokens)
    bitmaps = slash_bitmaps(tokens, columns, density, shape.heads, host)
    tiles = make_tiles(tokens, columns, bitmaps, shape.key_heads, host, "cuda")
    query, key, value, grad_out = make_inputs(tokens, shape, card)
    scale = shape.head_dim**-0.5
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    out, lse = triton_backend.attend(query, key, value, tiles, scale)
    triton_backend.attend_backward(grad_out, query, key, value, out, lse, tiles, scale)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    rows = block_sparse.base_2(lse), block_sparse.row_delta(grad_out, out)
    gathered = key, value
    runs = {
        "forward": lambda: triton_backend.attend(query, key, value, tiles, scale),
        "backward": lambda: triton_backend.attend_backward(
            grad_out, query, key, value, out, lse, tiles, scale
        ),
        "delta": lambda: block_sparse.row_delta(grad_out, out),
        "dK, dV": lambda: block_sparse.backward_key(grad_out, query, key, value, *rows, tiles, scale),
    }
    if columns:
        gathered = [vertical.gather_columns(x, tiles.columns, shape.heads) for x in (key, value)]
        dkey, dvalue = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        runs["gather"] = lambda: vertical.gather_columns(key, tiles.columns, shape.heads)
        runs["dK, dV of columns"] = lambda: vertical.add_column_gradients(
            dkey, dvalue, grad_out, query, gathered, rows, tiles, scale
        )
    runs["dQ"] = lambda: block_sparse.backward_query(grad_out, query, *gathered, *rows, tiles, scale)
    return tiles, {name: milliseconds(run) for name, run in runs.items()}, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="kernels", help="files to write, without their ending")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the masks to time")
    options = parser.parse_args()
    shape = Shape(head_dim=options.head_dim)
    errors = check(shape)
    rate = matrix_rate()
    rows, peaks, fastest = [], [], {}
    for tokens in sorted({tokens for tokens, *_ in CASES[: options.cases]}):
        pairs = shape.heads * tokens * (tokens + 1) // 2
        for name, times in dense(tokens, shape).items():
            made = table_rows(name, tokens, 1.0, pairs * shape.head_dim, times, rate)
            fastest[tokens] = min(fastest.get(tokens, float("inf")), float(made[-1]["ms"]))
            rows += made
        torch.cuda.empty_cache()
    for tokens, columns, density in CASES[: options.cases]:
        tiles, times, peak = sparse(tokens, columns, density, shape)
        pairs = int(attended_pairs(tiles).sum())
        del tiles
        torch.cuda.empty_cache()
        share = pairs / (shape.heads * tokens * (tokens + 1) / 2)
        made = table_rows(f"minfer, {columns} columns", tokens, share, pairs * shape.head_dim, times, rate)
        made[-1]["dense / this"] = f"{fastest[tokens] / float(made[-1]['ms']):.1f}"
        rows += made
        peaks.append(f"{tokens} tokens, {columns} columns: {peak:.2f} GiB")
    write(Path(options.out), rows, errors, peaks, rate, shape)


def table_rows(name: str, tokens: int, share: float, work: int, times: dict, rate: float) -> list[dict]:
    """Rows of the table, the last one for both ways; `work` is d * pairs. Parts of a pass have only times."""
    operations = {"forward": 4 * work, "backward": 10 * work, "both": 14 * work}
    times = times | {"both": tuple(map(sum, zip(times["forward"], times["backward"], strict=True)))}
    rows = []
    for part, (median, low, high) in times.items():
        row = {"kernel": name, "tokens": tokens, "density": f"{share:.3f}", "part": part}
        row |= {"ms": f"{median:.2f}", "20 %": f"{low:.2f}", "80 %": f"{high:.2f}", "active TFLOP/s": ""}
        row |= {"% of product": "", "dense / this": ""}
        if part in operations:
            speed = operations[part] / median / 1e9
            row |= {"active TFLOP/s": f"{speed:.0f}", "% of product": f"{100 * speed / rate:.0f}"}
        rows.append(row)
    return rows


def write(path: Path, rows: list[dict], errors: dict, peaks: list[str], rate: float, shape: Shape) -> None:
    """The CSV and the Markdown report, which is printed too."""
    import triton

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        "# Kernels of one ring step",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, Python "
        f"{platform.python_version()}; bfloat16, batch 1, {shape.heads} query, {shape.key_heads} key heads, "
        f"head size {shape.head_dim}, blocks of {BLOCK}. Matrix product 8192^3: {rate:.0f} TFLOP/s. Median "
        "and 20 / 80 % quantiles. Operations are counted from the lists: 4 * d for an attended pair in the "
        "forward, 2.5 times that in the backward. A backward includes delta and the gathering of columns.",
        "",
        f"    python -m tools.bench.bench_kernels {' '.join(sys.argv[1:])}",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows),
        "",
        "Forward + backward of the public MTraining kernels (Triton, fp32 atomics) at the same shape and "
        "density, measured apart: "
        + "; ".join(f"{t} tokens, {c} columns {ms} ms" for (t, c), ms in REFERENCE_MS.items())
        + ".",
        "",
        "Peak memory of forward + backward past inputs and lists: " + "; ".join(peaks) + ".",
        "",
        "Relative error against float64 at 2048 tokens with the same mask; two runs are equal in every bit:",
        "",
        "| | these kernels | SDPA in bfloat16 |",
        "|---|---|---|",
        *(f"| {name} | {mine:.2e} | {theirs:.2e} |" for name, (mine, theirs) in errors.items()),
        "",
    ]
    path.with_suffix(".md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
