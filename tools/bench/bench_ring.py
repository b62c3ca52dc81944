"""Balance and waiting of ring attention on 8 to 128 virtual ranks.

    python -m tools.bench.bench_ring --out tools/bench/results/2026-12-01-ring.md

Masks of every method are drawn at --tokens (tools/plan/work.py), dealt to ranks, and the attended pairs of
every (rank, source) are counted: imbalance follows from these counts alone. Then the links are modelled
(tools/plan/timeline.py): flat rings against two levels, with pairs over a measured rate as compute. With
--measure, on a GPU, every (rank, source) is also timed with the real kernels, and the sum of the ring's steps
set against the same attention in one launch.
"""

import argparse
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from megatron_mtrain.kernels.merge import merge
from megatron_mtrain.kernels.tiles import attend, attend_backward, row_delta
from megatron_mtrain.layouts import make_layout
from tools.plan import ring_time, work
from tools.plan.ring_time import A100, H200, Heads
from tools.plan.timeline import LINKS, Timeline

NODE = 8
ORDERS = ("zigzag", "stripe", "dr_stripe")
PAPER = (34.10, 19.53)  # ms: forward of one layer on 32 A100, flat and two-level (MTraining, section 5)


def main() -> None:
    args = arguments()
    if args.measure and not torch.cuda.is_available():
        sys.exit(
            "bench_ring.py: error: --measure needs an NVIDIA GPU; none is visible. Leave it out to count"
        )
    pairs = {}
    for method in args.attn_type:
        pairs[method] = work.block_pairs(work.draw(method, args.tokens, args.heads))
        sys.stderr.write(f"{method}: density {density(pairs[method], args):.3f}\n")
    parts = [header(args), balance(args, pairs), timelines(args, pairs), sensitivity(args, pairs)]
    parts += [paper(args), measured(args) if args.measure else NOT_MEASURED]
    report = "\n".join(parts)
    print(report)
    if args.out:
        args.out.write_text(report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--tokens", type=int, default=524288)
    flag("--world", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="context-parallel ranks")
    flag("--attn-type", nargs="+", default=list(work.METHODS), choices=work.METHODS)
    flag("--heads", type=int, default=16, help="query heads")
    flag("--groups", type=int, default=2, help="key heads")
    flag("--rate", type=float, default=H200.rate / 1e12, help="active TFLOP/s of an H200, see kernels.md")
    flag("--measure", action="store_true", help="time every tile with the real kernels, on a GPU")
    flag("--out", type=Path, help="file of the report")
    return parser.parse_args()


def density(pairs, args) -> float:
    return float(pairs.sum()) / (args.heads * args.tokens * (args.tokens + 1) / 2)


def shape_of(order: str, world: int) -> tuple[int, ...]:
    """The rings of an order: nodes of NODE ranks on two levels, or one flat ring."""
    return (NODE, world // NODE) if order == "dr_stripe" and world > NODE else (world,)


def layout_of(order: str, world: int, tokens: int):
    return make_layout("zigzag" if order == "zigzag" else "stripe", tokens, world, work.BLOCK)


def header(args) -> str:
    """Title, versions, command, and what is counted, modelled and measured."""
    return f"""# Rings of 8 to 128 ranks

torch {torch.__version__}, Python {platform.python_version()}; {args.tokens} tokens, {args.heads} query and
{args.groups} key heads of 128, blocks of {work.BLOCK}.

    python -m tools.bench.bench_ring {" ".join(sys.argv[1:])}

- Counted: the attended pairs of every (rank, source), from masks drawn with fixed budgets by
  tools/plan/work.py. Tests hold the counts against the lists that the package's index makes for the kernels.
- Measured elsewhere: {args.rate:g} active TFLOP/s of forward and backward on an H200 (2026-12-01-kernels.md).
- Modelled: the links, by bandwidth and latency; merging, by bytes; that a small step runs at the rate of a
  large one. The order of sends, waits and steps is that of ring.py, run once per virtual rank with a recorder
  in place of the network.
"""


def table(head: list[str], rows: list[list]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def balance(args, pairs) -> str:
    """Worker and step imbalance of every method, order and number of ranks."""
    rows = []
    for method, blocks in pairs.items():
        for order in ORDERS:
            row = [method, f"{density(blocks, args):.3f}", order]
            for world in args.world:
                dealt = ring_time_of(blocks, order, world, args)
                steps, worst = ring_time.step_imbalance(dealt, shape_of(order, world))
                row.append(f"{ring_time.worker_imbalance(dealt):.2f} / {steps:.2f} / {worst:.2f}")
            rows.append(row)
    head = ["method", "density", "order", *(f"W = {world}" for world in args.world)]
    return f"""## Imbalance

Work of the busiest rank over the mean: over the whole layer (worker) / of every step, summed (step) / in the
worst step that is worth a tenth of the mean step. 1 is even. dr_stripe is stripe on rings of {NODE} ranks.

{table(head, rows)}"""


def ring_time_of(blocks, order: str, world: int, args):
    return work.rank_pairs(blocks, layout_of(order, world, args.tokens))


def layer(blocks, order: str, world: int, args, machine) -> list[Timeline]:
    """Modelled forward and backward of one layer."""
    dealt, heads = ring_time_of(blocks, order, world, args), Heads(args.heads, args.groups)
    lines = []
    for backward in (False, True):
        how = {"machine": machine, "backward": backward}
        seconds = ring_time.step_seconds(dealt, args.tokens // world, heads, **how)
        shape = shape_of(order, world)
        lines.append(ring_time.ring_pass(seconds, args.tokens // world, heads, shape, **how))
    return lines


def cell(lines: list[Timeline]) -> str:
    total, busiest = (sum(getattr(line, name) for line in lines) for name in ("total", "busiest"))
    return f"{1e3 * total:.2f} ({100 * busiest / total:.0f} %)"


def timelines(args, pairs) -> str:
    """Forward and backward of one layer on nodes of 8 H200."""
    machine = replace(H200, rate=args.rate * 1e12)
    rows = [
        [method, order, *(cell(layer(blocks, order, world, args, machine)) for world in args.world)]
        for method, blocks in pairs.items()
        for order in ORDERS
    ]
    return f"""## One layer, forward and backward, on {machine.name} (modelled)

ms until the last rank has ended, and the busiest rank's compute as a share of it: 100 % is a ring that nobody
notices.

{table(["method", "order", *(f"W = {world}" for world in args.world)], rows)}"""


def sensitivity(args, pairs, world: int = 32) -> str:
    """The same with other links between nodes, minfer."""
    blocks, rows = pairs.get("minfer", next(iter(pairs.values()))), []
    cases = [("NDR, a card per GPU", "ndr", 8), ("HDR, a card per GPU", "hdr", 8), ("HDR, 2 cards", "hdr", 2),
             ("HDR, 1 card", "hdr", 1)]  # fmt: skip
    for inner in ("nvlink4", "pcie4"):
        for name, outer, cards in cases:
            cluster = replace(H200.cluster, inner=LINKS[inner], outer=LINKS[outer], cards=cards)
            machine = replace(H200, rate=args.rate * 1e12, cluster=cluster)
            rows.append([inner, name, *(cell(layer(blocks, o, world, args, machine)) for o in ORDERS)])
    return f"""## Other links (modelled): minfer, W = {world}

{table(["in a node", "between nodes", *ORDERS], rows)}"""


def paper(args) -> str:
    """The paper's cluster: 4 nodes of 8 A100, forward of one layer."""
    rows = []
    for slash_share in (0.01, 0.025, 0.05):
        budget = work.Budget(slash_share=slash_share)
        blocks = work.block_pairs(work.draw("minfer", args.tokens, args.heads, budget=budget))
        for name, cluster in (
            ("HDR, a card per GPU", A100.cluster),
            ("HDR, 4 cards", replace(A100.cluster, cards=4)),
        ):
            machine = replace(A100, cluster=cluster)
            flat, two = (layer(blocks, order, 32, args, machine)[0] for order in ("stripe", "dr_stripe"))
            times = (1e3 * flat.total, 1e3 * two.total, flat.total / two.total, 1e3 * two.busiest)
            rows.append([f"{density(blocks, args):.3f}", name, *(f"{time:.2f}" for time in times)])
    head = [
        "density",
        "links",
        "flat, ms",
        "two levels, ms",
        "flat / two levels",
        "busiest rank's compute, ms",
    ]
    return f"""## The paper's cluster: 4 x 8 A100, forward of one minfer layer (modelled)

Published: {PAPER[0]} ms flat, {PAPER[1]} ms on two levels, a factor of {PAPER[0] / PAPER[1]:.2f}. The density
of the paper's mask and its kernels' rate are unknown here: the rate is {A100.rate / 1e12:.0f} TFLOP/s, the
H200's times the ratio of nominal matrix rates, and the density varies. Only the shape of the result compares.

{table(head, rows)}"""


NOT_MEASURED = """## Not measured here

No GPU ran for this report. `--measure` on one times the real kernels on every (rank, source) and sets the sum
of the ring's steps against one launch.
"""


def measured(args) -> str:
    """Real kernels on every (rank, source): the same imbalance in ms, and the ring's sum over one launch."""
    rows = []
    for method in args.attn_type:
        mask = work.draw(method, args.tokens, args.heads)
        whole = sum(t.sum() for t in times(mask, "stripe", 1, args, "cuda"))
        for world in args.world:
            for order in ORDERS[:2]:
                forward, backward = times(mask, order, world, args, "cuda")
                total = forward + backward
                steps, worst = ring_time.step_imbalance(total, (world,))
                ratio, worker = float(total.sum() / whole), ring_time.worker_imbalance(total)
                cells = [f"{number:.2f}" for number in (worker, steps, worst, 1e3 * total.sum(), ratio)]
                rows.append([method, order, world, *cells])
                sys.stderr.write(f"{rows[-1]}\n")
    head = ["method", "order", "W", "worker", "step", "worst step", "sum of all steps, ms", "/ one launch"]
    return f"""## Measured on {torch.cuda.get_device_name()}

Every (rank, source) with the real kernels, forward and backward, merging included; median of 3.

{table(head, rows)}"""


def times(mask, order: str, world: int, args, device: str):
    """Seconds of the forward and of the backward of every (rank, source): two float64 [W, W]."""
    layout = layout_of(order, world, args.tokens)
    tokens, draw = args.tokens // world, torch.Generator(device).manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value, grad = (
        torch.randn(tokens, 1, heads, 128, device=device, dtype=dtype, generator=draw)
        for heads in (args.heads, args.groups, args.groups, args.heads)
    )
    scale, forward, backward = 128**-0.5, torch.zeros(world, world), torch.zeros(world, world)
    for rank in range(world):
        index = work.index_of(mask, layout, rank, groups=args.groups, device=device)
        out, lse = attend(query, key, value, index.tiles(rank), scale)  # lse of a row is never -inf here
        delta = row_delta(grad, out)
        running, grad_query = (out.clone(), lse.clone()), torch.zeros_like(out)
        for source in range(world):
            tiles = index.tiles(source, by_key=True)

            def step(tiles=tiles, running=running):
                made = attend(query, key, value, tiles, scale)
                if world > 1:
                    merge(*running, *made)

            def step_back(tiles=tiles, out=out, lse=lse, delta=delta, grad_query=grad_query):
                dq, _, _ = attend_backward(grad, query, key, value, out, lse, tiles, scale, delta=delta)
                if world > 1:
                    grad_query.add_(dq)

            forward[rank, source], backward[rank, source] = (seconds(s, device) for s in (step, step_back))
    return forward.double(), backward.double()


def seconds(call, device: str) -> float:
    """Median of three calls, after one."""
    found = []
    for _ in range(4):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return median(found[1:])


if __name__ == "__main__":
    main()
