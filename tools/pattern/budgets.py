"""What share of true attention a head keeps under minfer, and at what cost, for all budgets of a grid.

Budgets of a grid are nested: what a level selects, every later level selects too. So a column has a first
level at which it is on, and so has a block distance; a pair (t, u) is attended from level `columns[u]` of the
one axis on, or from level `blocks[t // G - u // G]` of the other. A two-dimensional histogram of what is
missed therefore holds the answer for all budgets.

Legend: N tokens, G block size, M = N / G blocks, r sampled rows, H query heads, g key heads, d head size, V
and S levels of columns and of slashes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_mtrain.index.minfer import block_distances, probe_profiles
from megatron_mtrain.kernels.select import select
from megatron_mtrain.layouts import make_layout

ROWS = 64  # of the attention matrix at a time


@dataclass(frozen=True)
class Settings:
    """minfer's settings beside the budgets, as in MinferConfig and AttentionConfig."""

    last_q: int = 64
    sink_tokens: int = 30
    local_window: int = 100
    block_size: int = 128


class Axis(NamedTuple):
    """Nested budgets of columns or of slashes, by level: a share of the probe mass (None: fixed), a cap."""

    shares: tuple[float | None, ...]
    caps: tuple[int, ...]

    def entry(self, level: int) -> int | list:
        """The budget of a level as a pattern file spells it."""
        share, cap = self.shares[level], self.caps[level]
        return cap if share is None else [share, cap]


def fixed_axis(budgets) -> Axis:
    """Fixed budgets, ascending."""
    caps = tuple(sorted(set(budgets)))
    return Axis((None,) * len(caps), caps)


def flex_axis(shares, cap: int) -> Axis:
    """Shares of the probe mass, ascending, under one cap."""
    ascending = tuple(sorted(set(shares)))
    return Axis(ascending, (cap,) * len(ascending))


class Measured(NamedTuple):
    """By head and budget, float64 [H, V, S]: mass kept (mean over rows), and pairs of a sequence attended."""

    kept: torch.Tensor
    pairs: torch.Tensor


def measure(query, key, rows, vertical: Axis, slash: Axis, settings: Settings) -> Measured:
    """query [N, H, d], key [N, g, d] after rotary embedding, rows int64 [r]: positions of query rows.

    The mass is that of the exact softmax of the rows over all their keys, in float32. The selection is
    minfer's own: the last queries probe, whatever rows are sampled. N must be a multiple of the block size.
    """
    num_tokens, size = len(query), settings.block_size
    scale = query.shape[-1] ** -0.5
    layout = make_layout("stripe", num_tokens, 1, size)
    probes = min(settings.last_q, num_tokens)
    profiles = probe_profiles(
        query[:, None], key[:, None], layout, [], rank=0, probes=probes, scale=scale
    ).squeeze(1)
    columns = _first_level(profiles[0], vertical)
    columns[:, : settings.sink_tokens] = 0
    distances = _first_level(profiles[1], slash)
    distances[:, : settings.local_window] = 0
    blocks = _block_levels(distances, len(slash.caps), size)
    member = torch.nn.functional.one_hot(columns, len(vertical.caps) + 1).float()  # [H, N, V + 1]
    missed = _missed_mass(query, key, rows, member, blocks, len(slash.caps), scale)
    kept = 1 - _beyond(missed) / len(rows)
    pairs = num_tokens * (num_tokens + 1) / 2 - _beyond(_pairs(member, blocks, len(slash.caps), size))
    return Measured(kept.cpu(), pairs.cpu())


def choose(measured: Measured, recall: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels int64 [H] of columns and of slashes: the fewest pairs that keep `recall`, ties to fewer columns.

    A head that no budget serves gets the one that keeps most.
    """
    kept, pairs = (tensor.flatten(1) for tensor in measured)
    enough = kept >= torch.minimum(kept.amax(1, keepdim=True), kept.new_tensor(recall))
    best = pairs.masked_fill(~enough, torch.inf).argmin(1)
    levels = measured.kept.shape[2]
    return best // levels, best % levels


def _first_level(scores, axis: Axis) -> torch.Tensor:
    """The first level that selects an entry, the number of levels where none does: int64 [H, N]."""
    level = torch.zeros(scores.shape, dtype=torch.int64, device=scores.device)
    for share, cap in zip(*axis, strict=True):
        wanted = torch.full((len(scores),), torch.inf if share is None else share, dtype=torch.float64)
        limit = torch.full((len(scores),), cap, dtype=torch.int32)
        level += ~select(scores.contiguous(), wanted.to(scores.device), limit.to(scores.device))
    return level


def _block_levels(distances, levels: int, size: int) -> torch.Tensor:
    """The first level at which a block distance is on: int64 [H, M]."""
    return sum((~block_distances(distances <= level, size)).long() for level in range(levels))


def _missed_mass(query, key, rows, member, blocks, levels: int, scale: float) -> torch.Tensor:
    """Mass of the rows by first level of its column and of its block distance: float64 [H, V + 1, S + 1]."""
    num_tokens, heads, _ = query.shape
    num_blocks = blocks.shape[1]
    size = num_tokens // num_blocks
    block = torch.arange(num_blocks, device=query.device)
    total = member.new_zeros(heads, member.shape[2], levels + 1, dtype=torch.float64)
    for part in rows.to(query.device).split(ROWS):
        distance = (part[:, None] // size - block).clamp(min=0)
        for head in range(heads):
            mass = _probability(query[part, head], key[:, head * key.shape[1] // heads], part, scale)
            by_column = torch.einsum(
                "rmk,mkv->rmv", mass.unflatten(1, (num_blocks, size)), member[head].unflatten(0, (-1, size))
            )
            level = torch.nn.functional.one_hot(blocks[head][distance], levels + 1).double()
            total[head] += torch.einsum("rmv,rms->vs", by_column.double(), level)
    return total


def _probability(query, key, positions, scale: float) -> torch.Tensor:
    """softmax over u <= t, float32 [r, N]."""
    scores = query.float() @ key.float().T * scale
    later = torch.arange(len(key), device=key.device) > positions[:, None]
    return scores.masked_fill_(later, -torch.inf).softmax(-1)


def _pairs(member, blocks, levels: int, size: int) -> torch.Tensor:
    """Pairs of different blocks by first level of their column and block distance: [H, V + 1, S + 1]."""
    before = member.unflatten(1, (-1, size)).sum(2).double().cumsum(1)  # columns of blocks 0 .. m
    distance = torch.nn.functional.one_hot(blocks, levels + 1).double()
    # At block distance D the keys are those of blocks 0 .. M - 1 - D, each seen by one block of queries.
    return size * torch.einsum("hmv,hms->hvs", before.flip(1), distance)


def _beyond(histogram: torch.Tensor) -> torch.Tensor:
    """What budgets (v, s) leave out: the sum over all later levels of both, [H, V, S]."""
    return histogram[:, 1:, 1:].flip(1, 2).cumsum(1).cumsum(2).flip(1, 2)


def sample_rows(length: int, count: int, seed: int) -> torch.Tensor:
    """`count` query positions int64, ascending, one drawn from each of as many equal parts of a sequence."""
    count = min(count, length)
    edges = torch.linspace(0, length, count + 1, dtype=torch.float64).long()
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return edges[:-1] + (drawn * edges.diff()).long()
