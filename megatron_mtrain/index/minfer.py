"""MInference's vertical-slash pattern, per batch: a few key columns and a few diagonals carry most of the
mass.

The last queries of the sequence probe all keys. Columns (keys that all of them look at) and slashes
(distances at which all of them look) are ranked by their mean probability and kept by budget, per query head.

Reference: MInference (arXiv 2407.02490), MTraining (arXiv 2510.18830).

Legend: N tokens, s of them local, G block size, M = N / G blocks, q probe rows, b batch, h query heads, g key
heads.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..kernels.probe_scores import log_mass, probe_scores
from ..kernels.select import select
from ..kernels.tile_lists import Slashes, block_distances, list_by_key, list_by_query, list_columns
from ..kernels.tiles import Tiles
from ..layouts import Layout
from ..pattern import load_pattern
from ..ring import all_gather, all_reduce
from .minfer_documents import build_by_document
from .sparse_index import SparseIndex


@dataclass(frozen=True)
class VerticalSlashIndex(SparseIndex):
    """attended(t, u) = u <= t and (slash_on[t // G - u // G] or vertical[u]), per batch entry and query head.

    slash_on  bool [b, h, M], by block distance; distance 0 is always on
    vertical  bool [b, h, N], by global position
    groups    key heads; slots, the most columns that a head can have

    Block distance 1 on and column 0 selected, M = 4:      # tile, | column in a tile that is off

        #
        ##
        |##
        | ##
    """

    slash_on: torch.Tensor
    vertical: torch.Tensor
    groups: int
    slots: int

    def tiles(self, source: int, *, by_key: bool = False) -> Tiles:
        device, size = self.slash_on.device, self.layout.block_size
        slashes = Slashes(self.slash_on, *(self.layout.blocks(rank, device) for rank in (self.rank, source)))
        count, index = list_by_query(slashes)
        key_count, key_index = list_by_key(slashes, self.groups) if by_key else (None, None)
        selected = self.vertical.index_select(-1, self.layout.positions(source, device))
        columns = list_columns(selected, slashes, size, min(self.slots, self.layout.local_tokens))
        return Tiles(
            count, index, source == self.rank, size, columns, key_count=key_count, key_index=key_index
        )

    def statistics(self) -> dict[str, torch.Tensor]:
        return {"columns": self.vertical.sum(-1), "slashes": self.slash_on.sum(-1)}

    def dense_mask(self) -> torch.Tensor:
        size, num_tokens = self.layout.block_size, self.layout.num_tokens
        block = torch.arange(num_tokens, device=self.vertical.device) // size
        distance = (block[:, None] - block).clamp(min=0)
        attended = self.slash_on[:, :, distance] | self.vertical[:, :, None]
        return attended & self.allowed(attended.device)


def build(  # noqa: PLR0913 - what build_index gives
    config, query, key, layout, rings, *, rank: int, layer: int, scale: float, documents=None
) -> VerticalSlashIndex:
    """Probes the keys with the last queries and selects columns and slashes by each head's budget.

    Raises ValueError when the pattern has no budget for this layer or these heads.
    """
    method, heads = config.method, query.shape[2]
    budgets = _budgets(method.pattern_config_name, layer, config.head_offset, heads, query.device)
    if documents is not None:
        shards = query, key, layout, rings
        return build_by_document(method, budgets, *shards, rank=rank, scale=scale, documents=documents)
    probes = min(method.last_q, layout.num_tokens)
    scores = probe_profiles(query, key, layout, rings, rank=rank, probes=probes, scale=scale)
    kept = select(scores.flatten(0, 2), *budgets.rows(query.shape[1])).view(scores.shape)
    columns, distances = kept.unbind(0)
    columns[..., : method.sink_tokens] = True
    distances[..., : method.local_window] = True
    slots = min(budgets.most_columns + method.sink_tokens, layout.num_tokens)
    on = block_distances(distances, layout.block_size)
    return VerticalSlashIndex(layout, rank, on, columns, key.shape[2], slots)


def probe_profiles(query, key, layout, rings, *, rank: int, probes: int, scale: float) -> torch.Tensor:
    """Mean probability that the last `probes` queries give every column and every distance: [2, b, h, N].

    query [s, b, h, d] and key [s, b, g, d] are this rank's shards; float32, float64 for float64 inputs.
    """
    probe = gather_probe(query, layout, rings, rank, probes)
    first, size = layout.num_tokens - probes, layout.block_size
    starts = layout.blocks(rank, query.device) * size
    lse = torch.logsumexp(all_gather(log_mass(probe, key, starts, first, scale, size), rings), 0)
    vertical, slash = probe_scores(
        probe, key, starts, first, lse, scale=scale, block_size=size, num_tokens=layout.num_tokens
    )
    vertical = layout.unshard(list(all_gather(vertical, rings)), -1)
    return torch.stack([vertical, all_reduce(slash, rings)])


@dataclass(frozen=True)
class _Budgets:
    """A layer's budgets of the local heads, on the device: shares float64 [2, h] (inf: fixed), caps int32 [2,
    h].

    The first row is for columns, the second for slashes.
    """

    share: torch.Tensor
    cap: torch.Tensor
    most_columns: int

    def rows(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Share and cap of every row of scores [2, batch, h, N]."""
        return tuple(tensor[:, None].expand(-1, batch, -1).flatten() for tensor in (self.share, self.cap))


@lru_cache(maxsize=4096)
def _budgets(name, layer: int, head_offset: int, heads: int, device) -> _Budgets:
    pattern = load_pattern(name)
    if layer >= len(pattern) or head_offset + heads > len(pattern[layer]):
        raise ValueError(
            f"pattern {name} has {len(pattern)} layers of {len(pattern[0])} heads; layer {layer}, heads "
            f"{head_offset} .. {head_offset + heads - 1} were asked for. Give the pattern file of this model"
        )
    rows = pattern[layer][head_offset : head_offset + heads]
    shares = [[row.vertical_share for row in rows], [row.slash_share for row in rows]]
    caps = [[row.vertical_cap for row in rows], [row.slash_cap for row in rows]]
    filled = [[float("inf") if share is None else share for share in kind] for kind in shares]
    return _Budgets(
        torch.tensor(filled, dtype=torch.float64, device=device),
        torch.tensor(caps, dtype=torch.int32, device=device),
        max(caps[0]),
    )


def gather_probe(query, layout: Layout, rings, rank: int, probes: int) -> torch.Tensor:
    """The last `probes` queries of the sequence on every rank: [q, b, h, d].

    Every rank fills in the rows it holds and the sum completes them, exactly: all other terms are zero.
    """
    rows, places = probe_rows(layout, rank, probes, query.device)
    probe = query.new_zeros(probes, *query.shape[1:])
    probe[places] = query[rows]
    return all_reduce(probe, rings)


@lru_cache(maxsize=256)
def probe_rows(layout: Layout, rank: int, probes: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Which local rows of `rank` are among the last `probes` of the sequence, and which of those they are."""
    places = layout.positions(rank) - (layout.num_tokens - probes)
    rows = (places >= 0).nonzero()[:, 0]
    return rows.to(device), places[rows].to(device)


if __name__ == "__main__":
    from .draw import main

    main("minfer")
