"""How many (query, key) pairs a ring step attends, from its tiles, on their device and without a wait.

Legend: b batch, h query heads, m query blocks; begin, end a range of rows, low, high a range of keys.
"""

import torch

from .reference import unpack_bits
from .tiles import Tiles


def attended_pairs(tiles: Tiles) -> torch.Tensor:
    """The attended pairs of every batch entry and query head: int64 [b, h], exact."""
    size = tiles.block_size
    pairs = tiles.block_count.sum(-1) * size * size
    if tiles.diagonal:
        pairs = pairs - _listed_diagonal(tiles).sum(-1) * (size * (size - 1) // 2)
    if tiles.columns is not None:
        pairs = pairs + _bits(tiles.columns.visible).sum((-1, -2)) * size
    if tiles.routes is not None:
        rows = tiles.routes.row_start.diff(dim=-1).long()
        pairs = pairs + (rows * tiles.routes.key_start.diff()).sum(-1)
    return pairs if tiles.first_key is None else pairs - _hidden_pairs(tiles)


def _listed_diagonal(tiles: Tiles) -> torch.Tensor:
    """Whether query block i lists key block i: bool [b, h, m]. It is the last one then: lists ascend."""
    count, index = tiles.block_count, tiles.block_index
    last = index.gather(-1, (count.long() - 1).clamp(min=0)[..., None])[..., 0]
    return (last == torch.arange(count.shape[-1], device=last.device)) & (count > 0)


def _bits(words: torch.Tensor) -> torch.Tensor:
    """The number of bits that are set in every int32."""
    words = words.long() & 0xFFFFFFFF
    words = words - (words >> 1 & 0x55555555)
    words = (words & 0x33333333) + (words >> 2 & 0x33333333)
    return ((words + (words >> 4) & 0x0F0F0F0F) * 0x01010101 & 0xFFFFFFFF) >> 24


def _hidden_pairs(tiles: Tiles) -> torch.Tensor:
    """Pairs that are listed but lie before the first key of their row: int64 [b, h].

    One head at a time: that bounds memory by the lists of a head.
    """
    b, h, _ = tiles.block_count.shape
    hidden = [_hidden_of_head(tiles, entry, head) for entry in range(b) for head in range(h)]
    return torch.stack(hidden).view(b, h)


def _hidden_of_head(tiles: Tiles, entry: int, head: int) -> torch.Tensor:
    size, rows = tiles.block_size, _Rows(tiles.first_key[entry])
    count, index = tiles.block_count[entry, head], tiles.block_index[entry, head]
    begin = torch.arange(len(count), device=count.device)[:, None] * size
    listed = torch.arange(index.shape[-1], device=index.device) < count[:, None]
    low = torch.where(listed, index, 0).long() * size
    hidden = torch.where(listed, rows.hidden(low, low + size, begin, begin + size), 0).sum()
    if tiles.columns is not None:
        columns, visible = tiles.columns.index[entry, head].long(), tiles.columns.visible[entry, head]
        hidden += (rows.hidden(columns, columns + 1, begin, begin + size) * unpack_bits(visible)).sum()
    if tiles.routes is not None:
        starts, at = tiles.routes.row_start[entry, head], tiles.routes.row_index[entry, head].long()
        entries = torch.arange(len(at), dtype=starts.dtype, device=at.device)
        routed = entries < starts[-1]
        run = torch.searchsorted(starts, entries, right=True).clamp(max=len(starts) - 1) - 1
        low, high = (tiles.routes.key_start[run + end].long() for end in (0, 1))
        first = rows.first[torch.where(routed, at, 0)]
        hidden += torch.where(routed, torch.minimum(first, high) - low, 0).clamp(min=0).sum()
    return hidden


class _Rows:
    """The first key of every row, ascending, and their running sums."""

    def __init__(self, first: torch.Tensor):
        self.first = first.long()
        self.sums = torch.nn.functional.pad(self.first.cumsum(0), (1, 0))

    def hidden(self, low, high, begin, end) -> torch.Tensor:
        """Pairs of keys low .. high - 1 and rows begin .. end - 1 whose key is before the row's first one."""
        some = torch.searchsorted(self.first, low, right=True).clamp(begin, end)  # miss a part from here on
        whole = torch.searchsorted(self.first, high).clamp(begin, end)  # and all from here on
        return self.sums[whole] - self.sums[some] - low * (whole - some) + (high - low) * (end - whole)
