"""Seconds of every part of a training step on one GPU; step_time.py adds them up and compares layouts.

How each part is known:
- measured: the rate of attention, 410 active TFLOP/s on an H200 (2026-12-01-kernels.md), and the time of an
  index (2026-12-01-layer.md, 2026-12-01-moba-xattn.md); an A100 is scaled from it by nominal matrix rates;
- counted: operations of matrix products, attended pairs of every ring step from a drawn mask (work.py);
- modelled: links, merging and waiting on the ring (timeline.py); memory (memory.py); matrix products at
  --linear-share of the GPU's nominal rate; collectives of tensor and data parallelism at link bandwidth and
  not hidden; the pipeline's bubble, (pp - 1) micro batches; norms and activations, by bytes.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_mtrain.flops import linear_flops
from megatron_mtrain.layouts import Layout, make_layout

from . import work
from .memory_parts import Run, parameters
from .ring_time import H200, Heads, Machine, ring_pass, step_seconds
from .timeline import Timeline

# Seconds of an index on an H200, tokens and power of the length with which it grows; 16 heads, measured.
INDEX = {"minfer": (9.1e-3, 524288, 1), "moba": (14.6e-3, 524288, 1), "xattn": (23.2e-3, 131072, 2)}
DRAWN = 4  # heads of a drawn mask; those of a rank are taken to be as busy on average
PASSES = 24  # hidden states that norms and activations of a layer read or write, forward and backward


@dataclass(frozen=True)
class Plan:
    """A run on GPUs: `run` has the layout and what memory depends on.

    batch is the sequences of a step; rate the operations a second of matrix products; masks are drawn with
    `budget`.
    """

    run: Run
    batch: int
    machine: Machine
    rate: float
    budget: work.Budget = work.Budget()

    @property
    def gpus(self) -> int:
        return self.run.tp * self.run.cp * self.run.pp * self.run.dp

    @property
    def ring(self) -> tuple[int, ...]:
        """Sizes of the context-parallel rings, inner to outer: two levels where a ring leaves its node."""
        inner = max(1, self.machine.cluster.node_size // self.run.tp)
        flat = self.run.attn_type in ("zigzag_ring", "stripe_ring")
        two_level = not flat and inner > 1 and self.run.cp > inner and self.run.cp % inner == 0
        return (inner, self.run.cp // inner) if two_level else (self.run.cp,)

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.run.dp * self.run.micro_batch)


def parts(plan: Plan) -> dict[str, float]:
    """Seconds of a step by part, on the pipeline stage that takes longest: the last, with the loss."""
    run, shape, cluster = plan.run, plan.run.shape, plan.machine.cluster
    layers = shape.num_layers // run.pp
    again = 1 if run.recompute == "full" else 0
    head = 6 * run.tokens * shape.vocab_size * shape.hidden_size
    blocks = linear_flops(shape, run.tokens) - head
    linear = (blocks / run.pp * (3 + again) / 3 + head) / run.tp / plan.rate
    compute, waits = _attention(plan, again)
    hidden = run.tokens * shape.hidden_size * 2
    # A gather and a scatter of attention and of the MLP each, forward and backward, (tp - 1) / tp of it sent.
    exchanges = (8 + 4 * again) * layers * hidden * (run.tp - 1) / run.tp / cluster.inner.bandwidth
    micro = {
        "matrix products": linear,
        "attention": compute * layers,
        "waiting on the ring": waits * layers,
        "index": _index(plan) * layers * (1 + again if run.attn_reuse == "nothing" else 1),
        "norms, activations": PASSES * (3 + again) / 3 * layers * hidden / run.tp / plan.machine.memory,
        "tensor parallelism": exchanges,
        "pipeline transfers": 2 * hidden / cluster.outer.bandwidth if run.pp > 1 else 0.0,
    }
    step = {name: seconds * plan.micro_batches for name, seconds in micro.items()}
    return step | {"pipeline bubble": sum(micro.values()) * (run.pp - 1), **_optimizer(plan)}


def _index(plan: Plan) -> float:
    """Seconds of the index of one layer and micro batch."""
    run = plan.run
    if run.attn_type not in INDEX:
        return 0.0
    seconds, tokens, power = INDEX[run.attn_type]
    grown = seconds * (run.seq_length / tokens) ** power * run.heads[0] / 16 * run.micro_batch
    return grown / run.cp * H200.rate / plan.machine.rate


def _optimizer(plan: Plan) -> dict[str, float]:
    """Float32 gradients reduced and bf16 weights gathered over data- and context-parallel ranks, and Adam."""
    run, cluster = plan.run, plan.machine.cluster
    count, sharing = max(parameters(run, stage) for stage in (0, run.pp - 1)), run.dp * run.cp
    within = run.tp * sharing <= cluster.node_size
    bandwidth = cluster.inner.bandwidth if within else cluster.outer.bandwidth
    shards = sharing if run.distributed_optimizer else 1
    return {
        "gradient exchange": 6 * count * (sharing - 1) / sharing / bandwidth,
        "optimizer": 28 * count / shards / plan.machine.memory,
    }


def _attention(plan: Plan, again: int) -> tuple[float, float]:
    """(compute of the busiest rank, everything else) of one layer and micro batch, in seconds."""
    run, cluster = plan.run, plan.machine.cluster
    # Neighbours on a ring are tp GPUs apart, and the rings side by side share the cards of their node.
    node_size, cards = (max(1, number // run.tp) for number in (cluster.node_size, cluster.cards))
    machine = replace(plan.machine, cluster=replace(cluster, node_size=node_size, cards=cards))
    heads = Heads(*(number * run.micro_batch for number in run.heads), run.shape.head_dim)
    method = run.attn_type if run.attn_type in work.METHODS else "dense"
    layout = "zigzag" if run.attn_type == "zigzag_ring" else "stripe"
    dealt = make_layout(layout, run.seq_length, run.cp, work.BLOCK)
    found = _passes(method, dealt, heads, plan.ring, machine, plan.budget)
    passes = (1 if run.attn_reuse == "output" else 1 + again, 1)
    compute = sum(times * line.busiest for times, line in zip(passes, found, strict=True))
    return compute, sum(times * line.total for times, line in zip(passes, found, strict=True)) - compute


@lru_cache(maxsize=256)
def _passes(method: str, layout: Layout, heads: Heads, ring, machine: Machine, budget) -> list[Timeline]:
    """Forward and backward of one layer."""
    pairs = work.rank_pairs(_pairs(method, layout.num_tokens, budget), layout) * (heads.query / DRAWN)
    lines = []
    for backward in (False, True):
        how = {"machine": machine, "backward": backward}
        seconds = step_seconds(pairs, layout.local_tokens, heads, **how)
        lines.append(ring_pass(seconds, layout.local_tokens, heads, ring, **how))
    return lines


@lru_cache(maxsize=8)
def _pairs(method: str, tokens: int, budget):
    return work.block_pairs(work.draw(method, tokens, DRAWN, budget=budget))
