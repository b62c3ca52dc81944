"""Tile and column lists from masks: what a method decided becomes what the attention kernels walk.

The functions take CPU tensors through torch and GPU tensors through the Triton kernels of this file; the two
give equal lists. A tile mask comes in one of two forms: bool [b, h, m, n], or by block distance, `Slashes`.

Legend: b batch, h query heads, g key heads, m query blocks, n key blocks, M block distances, c column slots,
t key tokens, G block size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .reference import pack_bits
from .tiles import Columns

SLOTS = 64  # column slots come in multiples of this: one column tile of the attention kernels
CHUNK = 1024  # entries of a list that a program looks at together


class Slashes(NamedTuple):
    """A tile mask that depends on the block distance alone: mask[b, h, i, j] = on[b, h, query[i] - key[j]].

    on bool [b, h, M]; query int64 [m] and key int64 [n] are global block ids; negative distances are off.
    """

    on: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor

    def mask(self) -> torch.Tensor:
        """The tiles as bool [b, h, m, n]."""
        distance = self.query[:, None] - self.key
        return self.on[:, :, distance.clamp(min=0)] & (distance >= 0)


class TileMask(NamedTuple):
    """Any tile mask: on bool [b, h, m, n], of the global block ids query int64 [m] and key int64 [n]."""

    on: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor

    def mask(self) -> torch.Tensor:
        """The tiles as bool [b, h, m, n]."""
        return self.on


@triton.jit
def _is_on(mask, query, key, head, i, j, m, n, distances, inside, SLASHES: tl.constexpr):
    """Whether tiles (i, j) of a head are on; i or j may be a vector."""
    if SLASHES:
        # `+ 0 *` gives both pointers the shape of the mask, whichever of i and j is the vector.
        distance = tl.load(query + i + 0 * j, mask=inside, other=0) - tl.load(
            key + j + 0 * i, mask=inside, other=0
        )
        return tl.load(mask + head * distances + distance, mask=inside & (distance >= 0), other=0) != 0
    return tl.load(mask + (head * m + i) * n + j, mask=inside, other=0) != 0


@triton.jit
def query_lists_kernel(
    mask, query, key, count, index, m, n, distances, SLASHES: tl.constexpr, CHUNK: tl.constexpr
):
    """The list of one (head, query block): ids of its key blocks, ascending."""
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = index + (head * m + i) * n
    found = 0
    for start in range(0, n, CHUNK):
        j = start + tl.arange(0, CHUNK)
        on = _is_on(mask, query, key, head, i, j, m, n, distances, j < n, SLASHES).to(tl.int32)
        tl.store(row + found + tl.cumsum(on, 0) - 1, j, mask=on > 0)
        found += tl.sum(on, 0)
    tl.store(count + head * m + i, found)


@triton.jit
def key_lists_kernel(mask, query, key, count, index, m, n, distances, GROUP: tl.constexpr,
                     SLASHES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The list of one (key head, key block): its (query head of the group, query block) pairs, ascending."""
    j, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = index + (pair * n + j) * GROUP * m
    found = 0
    for member in range(GROUP):
        head = pair * GROUP + member
        for start in range(0, m, CHUNK):
            i = start + tl.arange(0, CHUNK)
            on = _is_on(mask, query, key, head, i, j, m, n, distances, i < m, SLASHES).to(tl.int32)
            tl.store(row + found + tl.cumsum(on, 0) - 1, member * m + i, mask=on > 0)
            found += tl.sum(on, 0)
    tl.store(count + pair * n + j, found)


@triton.jit
def column_slots_kernel(selected, before, index, t, c, n, G: tl.constexpr):
    """Writes the selected keys of one block behind those of the earlier blocks of its head."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    local = block * G + tl.arange(0, G)
    on = tl.load(selected + head * t + local).to(tl.int32)
    slot = tl.load(before + head * (n + 1) + block) + tl.cumsum(on, 0) - 1
    tl.store(index + head * c + slot, local, mask=(on > 0) & (slot < c))


@triton.jit
def column_bits_kernel(on, query, key, index, limit, visible, m, n, c, distances, G: tl.constexpr,
                       SLASHES: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Visibility bits of one (head, query block): in front of `limit`, and in no tile that is on."""
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.load(limit + head * m + i)
    block = tl.load(query + i)
    row = visible + (head * m + i) * (c // 32)
    for start in range(0, c // 32, WORDS):
        word = start + tl.arange(0, WORDS)
        slot = word[:, None] * 32 + tl.arange(0, 32)[None, :]
        column = tl.load(index + head * c + slot, mask=slot < end, other=0)
        if SLASHES:
            distance = block - tl.load(key + column // G, mask=slot < end, other=0)
            at, inside = head * distances + distance, (slot < end) & (distance >= 0)
        else:
            at, inside = (head * m + i) * n + column // G, slot < end
        covered = tl.load(on + at, mask=inside, other=1)
        bits = ((slot < end) & (covered == 0)).to(tl.int32) << tl.arange(0, 32)[None, :]
        tl.store(row + word, tl.sum(bits, 1), mask=word < c // 32)


def list_by_query(mask) -> tuple[torch.Tensor, torch.Tensor]:
    """The attended key blocks of every query block.

    mask bool [b, h, m, n] or Slashes. Returns count int32 [b, h, m] and index int32 [b, h, m, n], ascending
    in its first `count` slots.
    """
    if _device(mask).type != "cuda":
        return _list(_tile_mask(mask))
    return query_lists(mask)


def list_by_key(mask, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The attending (head, query block) pairs of every key block and key head.

    mask bool [b, h, m, n] or Slashes. Returns count int32 [b, g, n] and index int32 [b, g, n, (h / g) * m]
    whose entries are (query head within its group) * m + query block, ascending in the first `count` slots.
    """
    if _device(mask).type != "cuda":
        return _list(_tile_mask(mask).unflatten(1, (groups, -1)).flatten(2, 3).transpose(-1, -2))
    return key_lists(mask, groups)


def list_ranges(first, count, slots: int, *, batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The lists of query blocks that attend a range of key blocks, alike for every head.

    Query block i attends key blocks first[i] .. first[i] + count[i] - 1, at most `slots`; first and count
    int64 [m], alike for every batch entry, or [batch, m]. Returns count int32 [batch, heads, m] and index
    int32 [batch, heads, m, slots].
    """
    index = first[..., None] + torch.arange(slots, device=first.device)
    return _for_heads(count, batch, heads), _for_heads(index, batch, heads, 2)


def list_key_ranges(
    first, count, slots: int, *, num_blocks: int, batch: int, heads: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`list_ranges` by key block: query blocks first[j] .. first[j] + count[j] - 1 attend key block j.

    first and count int64 [n] or [batch, n], num_blocks the number m of query blocks. Returns count int32
    [batch, groups, n] and index int32 [batch, groups, n, (heads / groups) * slots], entries as in
    `list_by_key`.
    """
    members = heads // groups
    entry = torch.arange(members * slots, device=first.device)
    each = count.clamp(min=1)[..., None]
    index = entry // each * num_blocks + first[..., None] + entry % each
    return _for_heads(members * count, batch, groups), _for_heads(index, batch, groups, 2)


def block_distances(distances, block_size: int) -> torch.Tensor:
    """Block distances that the token distances touch, floor and ceil of distance / G: bool [.., N] to [..,
    M]."""
    floor = distances.unflatten(-1, (-1, block_size)).any(-1)
    shifted = torch.nn.functional.pad(distances[..., 1:], (0, 1)).unflatten(-1, (-1, block_size)).any(-1)
    on = floor | torch.nn.functional.pad(shifted[..., :-1], (1, 0))
    on[..., 0] = True
    return on


def list_columns(selected, tiles: Slashes | TileMask, block_size: int, slots: int) -> Columns:
    """The selected key tokens of every head, and which query blocks see them.

    selected bool [b, h, t], in the order of the visiting shard, with at most `slots` true in a row; in
    `tiles`, those that the step attends anyway, no column is visible.
    """
    slots = -(-slots // SLOTS) * SLOTS
    per_block = selected.unflatten(-1, (-1, block_size)).sum(-1, dtype=torch.int32)
    before = torch.nn.functional.pad(per_block.cumsum(-1, dtype=torch.int32), (1, 0))
    # Blocks ascend, so those in front of a query block are the first ones of the shard.
    earlier = torch.searchsorted(tiles.key, tiles.query)
    limit = before.index_select(-1, earlier)
    place = column_bits if selected.is_cuda else _column_bits
    index, visible = place(selected, tiles, before, limit, block_size, slots)
    return Columns(index, before[..., -1].contiguous(), limit, visible)


def query_lists(mask) -> tuple[torch.Tensor, torch.Tensor]:
    """list_by_query on Triton."""
    (b, h, m, n), arguments, shared = _launch(mask)
    count = torch.empty(b, h, m, dtype=torch.int32, device=arguments[0].device)
    index = torch.empty(b, h, m, n, dtype=torch.int32, device=count.device)
    query_lists_kernel[(m, b * h)](*arguments, count, index, m, n, **shared)
    return count, index


def key_lists(mask, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """list_by_key on Triton."""
    (b, h, m, n), arguments, shared = _launch(mask)
    count = torch.empty(b, groups, n, dtype=torch.int32, device=arguments[0].device)
    index = torch.empty(b, groups, n, h // groups * m, dtype=torch.int32, device=count.device)
    key_lists_kernel[(n, b * groups)](*arguments, count, index, m, n, GROUP=h // groups, **shared)
    return count, index


def column_bits(selected, tiles: Slashes | TileMask, before, limit, block_size: int, slots: int):
    """(index, visible) of list_columns on Triton."""
    (b, h, t), m, n = selected.shape, len(tiles.query), len(tiles.key)
    index = torch.zeros(b, h, slots, dtype=torch.int32, device=selected.device)
    column_slots_kernel[(n, b * h)](selected, before, index, t, slots, n, G=block_size)
    visible = torch.empty(b, h, m, slots // 32, dtype=torch.int32, device=selected.device)
    column_bits_kernel[(m, b * h)](
        tiles.on.contiguous(), tiles.query, tiles.key, index, limit, visible, m, n, slots, tiles.on.shape[-1],
        G=block_size, SLASHES=isinstance(tiles, Slashes), WORDS=32,
    )  # fmt: skip
    return index, visible


def _column_bits(selected, tiles: Slashes | TileMask, before, limit, block_size: int, slots: int):
    place = torch.where(selected, selected.cumsum(-1) - 1, slots)
    index = place.new_zeros(*selected.shape[:-1], slots + 1)
    index.scatter_(-1, place, torch.arange(selected.shape[-1]).expand_as(place))
    index = index[..., :slots]
    covered = tiles.mask()
    block = (index // block_size)[:, :, None].expand(-1, -1, covered.shape[2], -1)
    visible = (torch.arange(slots) < limit[..., None]) & ~covered.gather(-1, block)
    return index.int(), pack_bits(visible)


def _for_heads(tensor, batch: int, heads: int, dims: int = 1) -> torch.Tensor:
    """[..] or [batch, ..], with `dims` dimensions .., as int32 [batch, heads, ..]."""
    alike = tensor.int()[None] if tensor.dim() == dims else tensor.int()
    return alike[:, None].expand(batch, heads, *tensor.shape[-dims:]).contiguous()


def _list(mask) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.argsort(mask.logical_not().byte(), dim=-1, stable=True)
    return mask.sum(-1, dtype=torch.int32).contiguous(), index.int().contiguous()


def _device(mask) -> torch.device:
    return mask.on.device if isinstance(mask, Slashes) else mask.device


def _tile_mask(mask) -> torch.Tensor:
    return mask.mask() if isinstance(mask, Slashes) else mask


def _launch(mask):
    """(b, h, m, n), the first arguments of a list kernel and its settings."""
    if isinstance(mask, Slashes):
        b, h, distances = mask.on.shape
        m, n = len(mask.query), len(mask.key)
        arguments = (mask.on.contiguous(), mask.query, mask.key)
    else:
        (b, h, m, n), distances = mask.shape, 0
        mask = mask.contiguous()
        arguments = (mask, mask, mask)
    chunk = min(CHUNK, triton.next_power_of_2(max(m, n)))
    return (b, h, m, n), arguments, {"distances": distances, "SLASHES": distances > 0, "CHUNK": chunk}
