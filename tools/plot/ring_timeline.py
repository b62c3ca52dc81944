"""Draw who computes and who waits in one layer on a ring, by the model of tools/plan.

    python -m tools.plot.ring_timeline --attn-type minfer --tokens 524288 --world 16 --order dr_stripe
        --out ring.png

Nothing is measured: the mask is drawn with fixed budgets (tools/plan/work.py), attended pairs run at a
measured rate, and messages travel in the order of megatron_mtrain/ring.py over links of a given bandwidth.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.patches import Patch

from megatron_mtrain import AttentionConfig
from tools.bench.bench_ring import ORDERS, layout_of, shape_of
from tools.plan import ring_time, work
from tools.plan.ring_time import A100, H200, Heads, Machine
from tools.plan.timeline import Span, Timeline
from tools.plot.figures import WAITING, NoData, new_figure, output_parser, run_picture
from tools.plot.runs import Run, read_run

MACHINES = {"h200": H200, "a100": A100}
COMPUTING = ("#0072B2", "#56B4E9")  # by turns, so that steps can be told apart
ENDED = "#dddddd"
MOST_RANKS = 64
SIZES = (  # arguments of a run that its ring depends on
    *("context_parallel_size", "tensor_model_parallel_size", "seq_length"),
    *("num_attention_heads", "kv_channels"),
)


@dataclass(frozen=True)
class Ring:
    """One attention layer on a ring: method and its budget, global tokens, ranks, their order, and heads."""

    attn_type: str = "minfer"
    tokens: int = 524288
    world: int = 8
    order: str = "stripe"
    heads: Heads = Heads()
    budget: work.Budget = work.Budget()
    machine: Machine = H200

    def __post_init__(self):
        if self.attn_type not in work.METHODS or self.order not in ORDERS:
            known = ", ".join((*work.METHODS, *ORDERS))
            raise ValueError(f"no ring of {self.attn_type!r} on {self.order!r} is known; choose from {known}")
        if not 2 <= self.world <= MOST_RANKS:
            raise ValueError(f"{self.world} ranks cannot be drawn; give 2 to {MOST_RANKS}")
        layout_of(self.order, self.world, self.tokens)


@dataclass(frozen=True)
class Pass:
    """A forward or backward round the ring: what every rank does when, and the sums."""

    name: str
    spans: list[Span]
    times: Timeline


def passes(ring: Ring) -> tuple[list[Pass], float]:
    """(forward and backward of a layer, attended share of the causal pairs of the drawn mask)."""
    mask = work.draw(ring.attn_type, ring.tokens, ring.heads.query, budget=ring.budget)
    pairs = work.block_pairs(mask)
    dealt = work.rank_pairs(pairs, layout_of(ring.order, ring.world, ring.tokens))
    made, local = [], ring.tokens // ring.world
    for name in ("forward", "backward"):
        how, spans = {"machine": ring.machine, "backward": name == "backward"}, []
        seconds = ring_time.step_seconds(dealt, local, ring.heads, **how)
        shape = shape_of(ring.order, ring.world)
        times = ring_time.ring_pass(seconds, local, ring.heads, shape, spans=spans, **how)
        made.append(Pass(name, spans, times))
    density = float(pairs.sum()) / (ring.heads.query * ring.tokens * (ring.tokens + 1) / 2)
    return made, density


def figure(ring: Ring, made: list[Pass], density: float):
    """A bar for every rank, forward above backward."""
    picture, axes = new_figure(len(made), width=9, height=1.5 + len(made) * (1.0 + 0.13 * ring.world))
    for axis, each in zip(axes[:, 0], made, strict=True):
        for rank in range(ring.world):
            _bar(axis, rank, [span for span in each.spans if span.rank == rank], each.times.total)
        share = each.times.waited / each.times.total
        axis.set_title(
            f"{each.name}: {1e3 * each.times.total:.3g} ms; a rank waits, or has ended, {share:.0%} of it",
            fontsize=10,
        )
        axis.set(xlim=(0, 1e3 * each.times.total), ylim=(ring.world - 0.4, -0.6), ylabel="rank")
        axis.set_yticks(range(0, ring.world, -(-ring.world // 16)))
    axes[-1, 0].set_xlabel("ms since the layer's attention began")
    picture.suptitle(
        f"Modelled ring: {ring.attn_type} at {density:.1%} density, {ring.tokens} tokens, {ring.order} on "
        f"{ring.world} ranks\n({ring.machine.name})",
        fontsize=11,
    )
    key = [Patch(color=colour) for colour in (*COMPUTING, WAITING, ENDED)]
    labels = ["computes a step", "and the next", "waits for a message", "has ended"]
    picture.legend(key, labels, loc="outside lower center", ncols=4, frameon=False)
    return picture


def _bar(axis, rank: int, spans: list[Span], total: float) -> None:
    busy = [span for span in spans if span.source is not None]
    ended = max((span.end for span in spans), default=0.0)
    kinds = [(busy[0::2], COMPUTING[0]), (busy[1::2], COMPUTING[1])]
    kinds += [([span for span in spans if span.source is None], WAITING)]
    kinds += [([Span(rank, None, ended, total)], ENDED)]
    for some, colour in kinds:
        bars = [(1e3 * span.begin, 1e3 * (span.end - span.begin)) for span in some]
        axis.broken_barh(bars, (rank - 0.4, 0.8), facecolors=colour, linewidth=0)


def draw(ring: Ring):
    """The picture of one layer."""
    return figure(ring, *passes(ring))


def of_run(run: Run, machine: Machine = H200) -> Ring:
    """The ring of a run by its arguments, with as many columns and slashes as it logged last.

    Raises NoData for a run without a ring, or without what is needed to know it.
    """
    sizes = {name: run.argument(name, int) for name in SIZES}
    unknown = [name for name, size in sizes.items() if size is None]
    if unknown or run.argument("attn_type") is None:
        raise NoData(f"{run.folder} does not say its {', '.join(unknown) or 'attn_type'}")
    world, tokens = sizes["context_parallel_size"], sizes["seq_length"]
    if world == 1:
        raise NoData("the run has one context-parallel rank: there is no ring")
    kind, tensor = run.argument("attn_type"), sizes["tensor_model_parallel_size"]
    groups = run.argument("num_query_groups", int) or sizes["num_attention_heads"]
    heads = Heads(
        max(1, sizes["num_attention_heads"] // tensor), max(1, groups // tensor), sizes["kv_channels"]
    )
    try:
        config = AttentionConfig.from_yaml(kind, run.argument("train_attn_config"))
        method = kind if kind in work.METHODS else "dense"
        order = run.argument("attn_implementation") or config.implementation
        return Ring(method, tokens, world, order, heads, _budget(run, config, tokens), machine)
    except ValueError as error:
        raise NoData(f"its ring cannot be modelled: {error}") from None


def _budget(run: Run, config: AttentionConfig, tokens: int) -> work.Budget:
    """What the drawn mask may attend: as much as the run did."""
    budget, method = work.Budget(), config.method
    if config.attn_type == "moba":
        return replace(budget, chunk=method.moba_chunk_size, topk=method.moba_topk)
    if config.attn_type == "xattn":
        return replace(budget, threshold=method.threshold)
    if config.attn_type == "minfer" and run.has("attention/columns/mean"):
        columns, slashes = (
            run.series(f"attention/{what}/mean").values[-1] for what in ("columns", "slashes")
        )
        share = min(1.0, slashes * config.block_size / tokens)
        return replace(budget, columns=min(tokens, round(columns)), slash_share=share)
    return budget


def ring_of(args: argparse.Namespace) -> Ring:
    """What the command line asks for. Raises ValueError for what cannot be dealt or drawn."""
    if args.run is not None:
        return of_run(read_run(args.run), MACHINES[args.machine])
    heads = Heads(args.heads, args.groups, args.head_size)
    budget = work.Budget(columns=args.columns, slash_share=args.slash_share)
    machine = MACHINES[args.machine]
    return Ring(args.attn_type, args.tokens, args.world, args.order, heads, budget, machine)


def main() -> None:
    parser, ring = output_parser(__doc__), Ring()
    flag = parser.add_argument
    flag("--run", type=Path, help="take all sizes from this run's TensorBoard events")
    flag("--attn-type", choices=work.METHODS, default=ring.attn_type)
    flag("--tokens", type=int, default=ring.tokens)
    flag("--world", type=int, default=ring.world, help="context-parallel ranks")
    flag("--order", choices=ORDERS, default=ring.order)
    flag("--heads", type=int, default=ring.heads.query, help="query heads")
    flag("--groups", type=int, default=ring.heads.key, help="key heads")
    flag("--head-size", type=int, default=ring.heads.size)
    flag("--columns", type=int, default=ring.budget.columns, help="minfer: columns a head")
    flag("--slash-share", type=float, default=ring.budget.slash_share, help="minfer: of block distances")
    flag("--machine", choices=MACHINES, default="h200")
    run_picture(parser, lambda args: draw(ring_of(args)))


if __name__ == "__main__":
    main()
