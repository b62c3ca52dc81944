"""Exact causal attention in the same terms as the sparse methods: every tile that is not in the future."""

from dataclasses import dataclass

import torch

from ..kernels.tile_lists import list_key_ranges, list_ranges
from ..kernels.tiles import Rectangle, Tiles
from .sparse_index import SparseIndex


@dataclass(frozen=True)
class DenseIndex(SparseIndex):
    """All pairs u <= t of a document, for batch size `batch`, `heads` query heads and `groups` key heads."""

    batch: int
    heads: int
    groups: int
    device: torch.device

    def tiles(self, source: int, *, by_key: bool = False) -> Tiles:
        query, key = (self.layout.blocks(rank, self.device) for rank in (self.rank, source))
        first, after = torch.zeros_like(query), torch.full_like(key, len(query))
        if self.documents is not None:
            first, after = self.documents.reach(self.layout, self.rank, source, self.device)
        shape = {"batch": self.batch, "heads": self.heads}
        count = torch.searchsorted(key, query, right=True) - first
        count, index = list_ranges(first, count, len(key), **shape)
        key_count = key_index = None
        if by_key:
            earlier = torch.searchsorted(query, key)
            shape |= {"groups": self.groups, "num_blocks": len(query)}
            key_count, key_index = list_key_ranges(earlier, after - earlier, len(query), **shape)
        return Tiles(
            count,
            index,
            source == self.rank,
            self.layout.block_size,
            rectangle=self._rectangle(source) if self.documents is None else None,
            first_key=self.first_key(source, self.device),
            key_count=key_count,
            key_index=key_index,
        )

    def _rectangle(self, source: int) -> Rectangle | None:
        """Zigzag: later halves see earlier ranks whole, earlier ranks' first halves are seen by all rows."""
        tokens = self.layout.local_tokens
        if source == self.rank and (self.layout.name == "zigzag" or self.layout.world_size == 1):
            return Rectangle(0, tokens, causal=True)
        if self.layout.name != "zigzag":
            return None
        return (
            Rectangle(0, tokens // 2, False) if source < self.rank else Rectangle(tokens // 2, tokens, False)
        )

    def dense_mask(self) -> torch.Tensor:
        return self.allowed(self.device).expand(self.batch, self.heads, -1, -1)


def build(config, query, key, layout, rings, *, rank: int, documents=None, **_) -> DenseIndex:
    """The dense index; the contents of query and key do not matter."""
    shape = query.shape[1], query.shape[2], key.shape[2]
    return DenseIndex(layout, rank, *shape, query.device, documents=documents)


if __name__ == "__main__":
    from .draw import main

    main("dense")
