"""Columns: key tokens that are attended one by one, gathered into dense tiles (the vertical lines of a mask).

The columns of query head j of a group lie behind the shard's keys as the rows t + j * c + slot, so that the
kernels over query blocks (block_sparse.py) walk them as further tiles. Their dK and dV come from a pass of
their own over (tile of columns, chunk of query blocks), whose float32 parts are summed over chunks, and then
over the heads of the group, key token by key token, through the inverse of the column lists: in a fixed
order, without atomics.

Legend: as in walk.py; a chunk is a range of query blocks.
"""

import torch
import triton
import triton.language as tl

from .block_sparse import BACKWARD_KEY, dkey_step
from .walk import LOG2_E, fit, matrix, seen, vector, words

# Programs to aim for when the query blocks are cut into chunks. About half of them lie before their columns
# and stop at once, and 264 run at a time on an H200: at 131072 tokens 1024 columns take 2.7 ms, 3.1 with 8192
# programs, and 4096 columns 9.1 ms, 10.2 with 2048.
PROGRAMS = 4096
SMALLEST_CHUNK = 16  # query blocks; the parts of shorter chunks cost more to write and sum than they win


@triton.jit
def dcolumn_kernel(
    query, keys, values, grad_out, lse, delta, dkeys, dvalues, first_block, last_block, visible, first_slot,
    qk_scale, scale, m, chunk, c,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = BLOCK // ROWS
    tile = tl.program_id(0)
    query_head = tl.program_id(1)
    key_head = query_head // GROUP
    # Late chunks first: there all columns are visible, and the programs that find nothing to do are the last.
    part = tl.num_programs(2) - 1 - tl.program_id(2)
    end = tl.minimum((part + 1) * chunk, m)
    begin = tl.maximum(part * chunk, tl.load(first_block + query_head * tl.num_programs(0) + tile))
    if first_slot is not None:
        end = tl.minimum(end, tl.load(last_block + query_head * tl.num_programs(0) + tile))
    at = query_head % GROUP * c + tile * TILE
    k = keys.load([at, key_head * D])
    v = values.load([at, key_head * D])
    dk = tl.zeros([TILE, D], tl.float32)
    dv = tl.zeros([TILE, D], tl.float32)
    bits = visible + (query_head * m).to(tl.int64) * (c // 32) + tile * TILE // 32
    low, high = words(bits + begin * (c // 32), tile * TILE % 32, begin < end, TILE)
    for step in range(begin * parts, end * parts):
        block = (step + 1) // parts
        next_low, next_high = words(bits + block * (c // 32), tile * TILE % 32, block < end, TILE)
        row = step * ROWS
        q = query.load([row, query_head * D])
        do = grad_out.load([row, query_head * D])
        row_lse = lse.load([query_head * (m * BLOCK) + row])
        row_delta = delta.load([query_head * (m * BLOCK) + row])
        scores = tl.dot(k, q.T, input_precision="ieee")
        shown = seen(low, high, TILE)[:, None]
        if first_slot is not None:
            slot = tl.where(shown, tile * TILE + tl.arange(0, TILE)[:, None], -1)
            shown = slot >= first_slot.load([query_head * (m * BLOCK) + row])[None, :]
        scores = tl.where(shown, scores, float("-inf"))
        dk, dv = dkey_step(scores, q, v, do, row_lse, row_delta, dk, dv, qk_scale)
        low, high = next_low, next_high
    row = (part * tl.num_programs(1) + query_head).to(tl.int64) * c + tile * TILE + tl.arange(0, TILE)
    to = row[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dkeys + to, dk * scale)
    tl.store(dvalues + to, dv)


@triton.jit
def add_columns_kernel(
    dkey, dvalue, dkeys, dvalues, slot_of, t, c, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    key_head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dk = tl.zeros([ROWS, D], tl.float32)
    dv = tl.zeros([ROWS, D], tl.float32)
    hit = tl.zeros([ROWS], tl.int32)
    for head in range(key_head * GROUP, key_head * GROUP + GROUP):
        slot = tl.load(slot_of + tl.cast(head, tl.int64) * (t + 1) + rows, mask=rows < t, other=-1)
        if tl.max(slot, 0) >= 0:
            wanted = slot >= 0
            hit |= wanted.to(tl.int32)
            at = (tl.cast(head, tl.int64) * c + slot)[:, None] * D + tl.arange(0, D)[None, :]
            dk += tl.load(dkeys + at, mask=wanted[:, None], other=0.0)
            dv += tl.load(dvalues + at, mask=wanted[:, None], other=0.0)
    to = rows.to(tl.int64)[:, None] * (tl.num_programs(1) * D) + key_head * D + tl.arange(0, D)[None, :]
    wanted = (hit != 0)[:, None]
    tl.store(dkey + to, tl.load(dkey + to, mask=wanted, other=0.0) + dk, mask=wanted)
    tl.store(dvalue + to, tl.load(dvalue + to, mask=wanted, other=0.0) + dv, mask=wanted)


def gather_columns(tensor, columns, heads: int) -> torch.Tensor:
    """key or value [t, b, g, d] with the columns of `heads` query heads behind: [t + (h / g) * c, b, g, d].

    Slots past the count of a head repeat row 0; no visibility bit shows them.
    """
    t, b, g, d = tensor.shape
    slots = heads // g * columns.index.shape[-1]
    rows = torch.empty(t + slots, b, g, d, dtype=tensor.dtype, device=tensor.device)
    rows[:t] = tensor
    index = columns.index.view(b, g, slots).permute(2, 0, 1).long()
    torch.gather(tensor, 0, index[..., None].expand(-1, -1, -1, d), out=rows[t:])
    return rows


def add_column_gradients(dkey, dvalue, grad_out, query, gathered, rows, tiles, scale: float) -> None:
    """Adds dK and dV of the columns to dkey and dvalue, float32 [t, b, g, d], in place.

    gathered is (keys, values) from `gather_columns`; rows is (lse, delta) of every query, lse from `base_2`.
    """
    columns, size = tiles.columns, tiles.block_size
    (s, b, h, d), (t, _, g, _), c = query.shape, dkey.shape, tiles.columns.index.shape[-1]
    q_rows, tile, warps, stages = fit(BACKWARD_KEY, tiles, query)
    m, tile_count = s // size, c // tile
    chunks = max(1, min(triton.cdiv(PROGRAMS, b * h * tile_count), m // SMALLEST_CHUNK))
    chunk = triton.cdiv(m, chunks)
    chunks = triton.cdiv(m, chunk)

    first_slot = None if columns.first_slot is None else vector(columns.first_slot, q_rows)
    parts = torch.empty(2, chunks, b, h, c, d, dtype=torch.float32, device=query.device)
    keys, values = (tensor[t:] for tensor in gathered)
    lse, delta = rows
    dcolumn_kernel[(tile_count, b * h, chunks)](
        matrix(query, q_rows), matrix(keys, tile), matrix(values, tile), matrix(grad_out, q_rows),
        vector(lse, q_rows), vector(delta, q_rows), parts[0], parts[1], *_query_blocks(tiles, tile),
        columns.visible, first_slot, qk_scale=scale * LOG2_E, scale=scale,
        m=m, chunk=chunk, c=c, GROUP=h // g, D=d, BLOCK=size, ROWS=q_rows, TILE=tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    sums = parts.sum(1)
    add_columns_kernel[(triton.cdiv(t, 32), b * g)](
        dkey,
        dvalue,
        sums[0],
        sums[1],
        _slot_of(columns, t),
        t=t,
        c=c,
        GROUP=h // g,
        D=d,
        ROWS=32,
        num_warps=4,
    )


def _query_blocks(tiles, tile: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The query blocks that may see a tile of columns: int32 [b, h, c / tile], from the first block, m where
    there is none, to the block past the last; None where that is m for all.
    """
    limit, first_slot = tiles.columns.limit[:, :, None], tiles.columns.first_slot
    starts = torch.arange(0, tiles.columns.index.shape[-1], tile, dtype=torch.int32, device=limit.device)
    sees = limit > starts[:, None]
    if first_slot is not None:
        sees &= first_slot[:, :, None, :: tiles.block_size] < starts[:, None] + tile
    first = torch.where(sees.any(-1), sees.int().argmax(-1), sees.shape[-1]).int()
    return first, None if first_slot is None else first + sees.sum(-1, dtype=torch.int32)


def with_first_slots(tiles):
    """`tiles` with the first slot of every row in its columns, where documents cut them."""
    columns, first_key = tiles.columns, tiles.first_key
    if columns is None or first_key is None:
        return tiles
    slots = torch.arange(columns.index.shape[-1], device=columns.index.device)
    keys = torch.where(slots < columns.count[..., None], columns.index, 2**31 - 1)
    rows = first_key[:, None].expand(-1, columns.index.shape[1], -1).contiguous()
    first_slot = torch.searchsorted(keys, rows, out_int32=True)
    return tiles._replace(columns=columns._replace(first_slot=first_slot))


def _slot_of(columns, t: int) -> torch.Tensor:
    """The inverse of the column lists: int32 [b, h, t + 1], a key token's slot or -1; entry t is a dump."""
    c = columns.index.shape[-1]
    slots = torch.arange(c, dtype=torch.int32, device=columns.index.device)
    used = slots < columns.count[..., None]
    inverse = torch.full((*columns.count.shape, t + 1), -1, dtype=torch.int32, device=columns.index.device)
    return inverse.scatter_(-1, torch.where(used, columns.index, t).long(), slots.expand_as(columns.index))
