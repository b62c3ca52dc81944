"""Exact causal attention in the same terms as the sparse methods: every tile that is not in the future."""

from dataclasses import dataclass

import torch

from ..kernels.tile_lists import list_by_key, list_by_query
from ..kernels.tiles import Rectangle, Tiles
from .sparse_index import SparseIndex, causal_mask


@dataclass(frozen=True)
class DenseIndex(SparseIndex):
    """All pairs u <= t, for batch size `batch`, `heads` query heads and `groups` key heads."""

    batch: int
    heads: int
    groups: int
    device: torch.device

    def tiles(self, source: int, *, by_key: bool = False) -> Tiles:
        mask = self.block_distance(source, self.device) >= 0
        count, index = list_by_query(mask.expand(self.batch, self.heads, -1, -1))
        key_count, key_index = None, None
        if by_key:
            key_count, key_index = list_by_key(mask.expand(self.batch, self.heads, -1, -1), self.groups)
        return Tiles(
            count,
            index,
            source == self.rank,
            self.layout.block_size,
            rectangle=self._rectangle(source),
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
        return causal_mask(self.layout.num_tokens, self.device).expand(self.batch, self.heads, -1, -1)


def build(config, query, key, layout, rings, rank, **_) -> DenseIndex:
    """The dense index; the contents of query and key do not matter."""
    return DenseIndex(layout, rank, query.shape[1], query.shape[2], key.shape[2], query.device)


if __name__ == "__main__":
    from .draw import main

    main("dense")
