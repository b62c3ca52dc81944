"""Tile and column lists from masks: what a method decided becomes what the attention kernels walk.

Legend: b batch, h query heads, g key heads, m query blocks, n key blocks, c column slots, t key tokens.
"""

import torch

from .reference import pack_bits
from .tiles import Columns

SLOTS = 64  # column slots come in multiples of this: one column tile of the attention kernels


def list_by_query(mask) -> tuple[torch.Tensor, torch.Tensor]:
    """The attended key blocks of every query block.

    mask bool [..., m, n]. Returns count int32 [..., m] and index int32 [..., m, n], ascending in its first `count`
    slots.
    """
    index = torch.argsort(mask.logical_not().byte(), dim=-1, stable=True)
    return mask.sum(-1, dtype=torch.int32).contiguous(), index.int().contiguous()


def list_by_key(mask, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The attending (head, query block) pairs of every key block and key head.

    mask bool [b, h, m, n]. Returns count int32 [b, g, n] and index int32 [b, g, n, (h / g) * m] whose entries are
    (query head within its group) * m + query block, ascending in the first `count` slots.
    """
    merged = mask.unflatten(1, (groups, -1)).flatten(2, 3).transpose(-1, -2)
    return list_by_query(merged)


def list_columns(selected, covered, visible_blocks, block_size: int, slots: int) -> Columns:
    """The selected key tokens of every head, and which query blocks see them.

    selected        bool [b, h, t], in the order of the visiting shard, at most `slots` true in a row
    covered         bool [b, h, m, n], tiles that the step attends anyway
    visible_blocks  int64 [m], for every query block the number of (leading) key blocks that lie before it
    """
    slots = -(-slots // SLOTS) * SLOTS
    count = selected.sum(-1, dtype=torch.int32)
    place = torch.where(selected, selected.cumsum(-1) - 1, slots)
    index = place.new_zeros(*selected.shape[:-1], slots + 1)
    index.scatter_(-1, place, torch.arange(selected.shape[-1], device=selected.device).expand_as(place))
    index = index[..., :slots]
    per_block = selected.unflatten(-1, (-1, block_size)).sum(-1)
    before = torch.nn.functional.pad(per_block.cumsum(-1), (1, 0))
    limit = before[..., visible_blocks]
    slot = torch.arange(slots, device=selected.device)
    block = (index // block_size)[:, :, None].expand(-1, -1, covered.shape[2], -1)
    visible = (slot < limit[..., None]) & ~covered.gather(-1, block)
    return Columns(index.int(), count, limit.int(), pack_bits(visible))
