"""Seconds that one attention layer takes on a ring, and how evenly ranks and steps share the work.

Compute is attended pairs over a measured rate, plus what every ring step adds: reading and writing the
running float32 result (merge in the forward, the sum of dQ in the backward). The ring is timeline.py's.

Legend: W ranks, s tokens of a rank, h query heads, g key heads, d head size.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from .timeline import LINKS, Cluster, Timeline, program, simulate

BACKWARD = 2.5  # operations of a backward, in forwards


@dataclass(frozen=True)
class Machine:
    """What computes: attention operations a second, bytes a second of memory, and the links between GPUs."""

    name: str
    rate: float
    memory: float
    cluster: Cluster


# The rate of the H200 is measured: forward and backward of minfer, tools/bench/results/2026-12-01-kernels.md.
# That of the A100 is the H200's times 312 / 989, their nominal matrix rates. Memory: 85 % of nominal.
H200 = Machine("8 x H200 a node, NVLink 4, NDR", 410e12, 4.1e12, Cluster())
A100 = Machine(
    "8 x A100 a node, NVLink 3, HDR", 129e12, 1.3e12, Cluster(inner=LINKS["nvlink3"], outer=LINKS["hdr"])
)


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads and head size of one rank."""

    query: int = 16
    key: int = 2
    size: int = 128


@lru_cache(maxsize=64)
def programs(shape: tuple[int, ...], backward: bool, key_bytes: int) -> list[list[tuple]]:
    """timeline.program of every rank; gradients are float32, keys bfloat16."""
    how = {"backward": backward, "key_bytes": key_bytes, "grad_bytes": 2 * key_bytes}
    return [program(rank, shape, **how) for rank in range(torch.Size(shape).numel())]


def step_seconds(pairs, tokens: int, heads: Heads, machine: Machine, *, backward: bool):
    """Modelled seconds of every ring step [W, W], from attended pairs [W, W] and s = `tokens` of a rank."""
    operations = 4 * heads.size * pairs * (BACKWARD if backward else 1)
    merged = 3 * 4 * tokens * heads.query * heads.size if len(pairs) > 1 else 0  # two reads and a write
    return operations / machine.rate + merged / machine.memory


def ring_pass(
    seconds, tokens: int, heads: Heads, shape, machine: Machine, *, backward: bool, spans=None
) -> Timeline:
    """A forward or backward whose steps take `seconds` [W, W] by rank and source, on rings of `shape`;
    `spans` as in simulate."""
    key_bytes = 2 * 2 * tokens * heads.key * heads.size
    events = programs(tuple(shape), backward, key_bytes)
    return simulate(events, seconds.tolist(), machine.cluster, spans=spans)


def worker_imbalance(work) -> float:
    """The busiest rank's work over the mean, from work [W, W] by rank and source."""
    by_rank = work.sum(1)
    return float(by_rank.max() / by_rank.mean())


def step_imbalance(work, shape) -> tuple[float, float]:
    """(all steps, worst step): the busiest rank's work over the mean, in the order of rings of `shape`.

    All steps: the sum of every step's maximum over the sum of every step's mean, which is what ranks lose
    that wait for each other after each step.
    """
    steps = [[event[1] for event in steps if event[0] == "compute"] for steps in programs(shape, False, 0)]
    ordered = torch.stack([row[order] for row, order in zip(work, torch.tensor(steps), strict=True)])
    most, mean = ordered.max(0).values, ordered.mean(0)
    # A step in which hardly anything is attended says nothing: it does not count as the worst one.
    worth = mean > 0.1 * mean.mean()
    return float(most.sum() / mean.sum()), float((most / mean)[worth].max())
