"""Attention over lists of tiles, forward and backward, in Triton: one ring step of a block-sparse mask.

query and grad_out are [s, b, h, d], key and value [t, b, g, d]: the matrices [s, b * h * d] and [t, b * g *
d], out of which a tensor descriptor takes the tile of any head without a permutation. The backward is two
kernels without atomics, so two runs agree in every bit: dQ walks the forward's list of a query block, dK and
dV the transposed list of a key block, which holds all query heads of its key head: nothing is left to reduce.

A list is walked in tiles of TILE keys (walk.py). Columns (vertical.py) are rows behind the keys, and a tile
of columns is one more step of the same walk. Only the scores of column tiles, of the tiles on the diagonal
and of those that the document of a row cuts are masked.

Legend: as in walk.py.
"""

import torch
import triton
import triton.language as tl

from .walk import (
    CHECKED,
    LN_2,
    LOG2_E,
    documents,
    fit,
    in_registers,
    key_row,
    lists,
    mask,
    matrix,
    row_program,
    settle,
    step_words,
    vector,
    walk,
)

# Largest tile (queries x keys), warps and pipeline stages, for 16 bits. Measured on an H200, bfloat16, head
# size 128, 131072 tokens, 5.4 % of the tiles, in ms: forward 7.9; 9.4 with 64 queries, 8 warps or 3 stages.
# dQ 9.9; 10.1 with 64 queries, 10.9 with 2 stages. dK and dV 13.6; 14.3 with 128 keys and 8 warps, 17.4 with
# 3 stages.
FORWARD = (128, 64, 4, 2)
BACKWARD_QUERY = (128, 64, 8, 4)
BACKWARD_KEY = (64, 64, 4, 2)


@triton.jit
def _softmax_step(scores, v, top, total, acc, qk_scale):
    """Adds the keys of one tile to the running softmax of every row.

    `top` starts finite: no -inf minus -inf. `total` [rows, 8] stays spread over the threads of a row.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * qk_scale)
    p = tl.exp2(scores * qk_scale - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade[:, None] + tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)
    acc = settle(tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee"))
    return new_top, total, acc


@triton.jit
def forward_kernel(
    query, key, value, out, lse, block_count, block_index, limit, visible, first_slot, first_key,
    heads, qk_scale, m, n, c,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    DIAGONAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    DOCUMENTS: tl.constexpr = first_key is not None
    key_head, query_head, block, first = row_program(m, GROUP, BLOCK, ROWS)
    ids, plain, listed, steps, behind, bits, late = walk(
        block_count, block_index, limit, visible, first_slot, first_key, heads, query_head, block, first,
        m, n, c, COLUMNS, DIAGONAL, GROUP, BLOCK, ROWS, TILE,
    )  # fmt: skip

    q = query.load([first, query_head * D])
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS, 8], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    rows = first + tl.arange(0, ROWS)

    # The next row is carried along: with the list read by the iteration that uses it, the loads start late,
    # and the pipeliner allocates two buffers whatever num_stages is.
    at = key_row(ids, 0, listed, behind, BLOCK, TILE)
    low, high = -1, -1
    if COLUMNS:
        low, high = step_words(bits, 0, listed, steps, TILE)
    for step in range(steps):
        next_at = key_row(ids, step + 1, listed, behind, BLOCK, TILE)
        scores = tl.dot(q, key.load([at, key_head * D]).T, input_precision="ieee")
        scores = mask(
            scores, step, plain, listed, at, first, low, high, late, DOCUMENTS, COLUMNS, DIAGONAL, ROWS, TILE
        )
        if COLUMNS:
            low, high = step_words(bits, step + 1, listed, steps, TILE)
        v = value.load([at, key_head * D])
        top, total, acc = _softmax_step(scores, v, top, total, acc, qk_scale)
        at = next_at

    total = tl.sum(total, 1)
    heads = tl.num_programs(0) // (m * (BLOCK // ROWS))
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    to = rows.to(tl.int64)[:, None] * (heads * D) + query_head * D + tl.arange(0, D)[None, :]
    tl.store(out + to, acc)
    natural = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN_2)
    tl.store(lse + query_head.to(tl.int64) * (m * BLOCK) + rows, natural)


@triton.jit
def _dquery_step(q, k, v, do, lse, delta, scores, acc, qk_scale):
    """Adds dS K of one tile to dQ, without the scale; `lse` is in base 2."""
    dp = tl.dot(do, v.T, input_precision="ieee")
    p = tl.exp2(scores * qk_scale - lse[:, None])
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")


@triton.jit
def dquery_kernel(
    query, key, value, grad_out, lse, delta, dquery, block_count, block_index, limit, visible, first_slot,
    first_key, heads, qk_scale, scale, m, n, c,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    DIAGONAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    DOCUMENTS: tl.constexpr = first_key is not None
    key_head, query_head, block, first = row_program(m, GROUP, BLOCK, ROWS)
    ids, plain, listed, steps, behind, bits, late = walk(
        block_count, block_index, limit, visible, first_slot, first_key, heads, query_head, block, first,
        m, n, c, COLUMNS, DIAGONAL, GROUP, BLOCK, ROWS, TILE,
    )  # fmt: skip

    q = in_registers(query.load([first, query_head * D]), D)
    do = in_registers(grad_out.load([first, query_head * D]), D)
    rows = first + tl.arange(0, ROWS)
    row_lse = tl.load(lse + query_head.to(tl.int64) * (m * BLOCK) + rows)
    row_delta = tl.load(delta + query_head.to(tl.int64) * (m * BLOCK) + rows)
    acc = tl.zeros([ROWS, D], tl.float32)

    at = key_row(ids, 0, listed, behind, BLOCK, TILE)
    low, high = -1, -1
    if COLUMNS:
        low, high = step_words(bits, 0, listed, steps, TILE)
    for step in range(steps):
        next_at = key_row(ids, step + 1, listed, behind, BLOCK, TILE)
        k = key.load([at, key_head * D])
        v = value.load([at, key_head * D])
        scores = tl.dot(q, k.T, input_precision="ieee")
        scores = mask(
            scores, step, plain, listed, at, first, low, high, late, DOCUMENTS, COLUMNS, DIAGONAL, ROWS, TILE
        )
        if COLUMNS:
            low, high = step_words(bits, step + 1, listed, steps, TILE)
        acc = _dquery_step(q, k, v, do, row_lse, row_delta, scores, acc, qk_scale)
        if not (CHECKED and D == 128):  # with both operands in registers, ptxas keeps the products in flight
            acc = settle(acc)
        at = next_at

    heads = tl.num_programs(0) // (m * (BLOCK // ROWS))
    to = rows.to(tl.int64)[:, None] * (heads * D) + query_head * D + tl.arange(0, D)[None, :]
    tl.store(dquery + to, acc * scale)


@triton.jit
def dkey_step(scores, q, v, do, lse, delta, dk, dv, qk_scale):
    """Adds one tile of transposed scores [keys, queries] to dK (without the scale) and dV; `lse` is in base
    2.

    Both products that need only the inputs come first: the other order took 5 to 10 % longer.
    """
    dp = tl.dot(v, do.T, input_precision="ieee")
    p = tl.exp2(scores * qk_scale - lse[None, :])
    ds = p * (dp - delta[None, :])
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return settle(dk), settle(dv)


@triton.jit
def _last_first_key(begins, entry, step, steps, m, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The largest first key of the rows of a step."""
    row = entry % m * BLOCK + step % (BLOCK // ROWS) * ROWS + ROWS - 1
    return tl.load(begins + row, mask=step < steps, other=0)


@triton.jit
def dkey_kernel(
    query, key, value, grad_out, lse, delta, dkey, dvalue, key_count, key_index, first_key, heads, qk_scale,
    scale, m, n, slots,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    DIAGONAL: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = BLOCK // ROWS
    tiles = n * (BLOCK // TILE)
    key_head = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TILE
    block = first // BLOCK
    row = key_head * n + block
    ids = key_index + row.to(tl.int64) * slots
    steps = tl.load(key_count + row) * parts

    k = key.load([first, key_head * D])
    v = value.load([first, key_head * D])
    dk = tl.zeros([TILE, D], tl.float32)
    dv = tl.zeros([TILE, D], tl.float32)
    entry = tl.load(ids, mask=steps > 0, other=0)
    begins, bound = None, None
    if first_key is not None:
        begins = first_key + (key_head * GROUP // heads).to(tl.int64) * (m * BLOCK)
        bound = _last_first_key(begins, entry, 0, steps, m, BLOCK, ROWS)
    for step in range(steps):
        next_entry = tl.load(ids + (step + 1) // parts, mask=step + 1 < steps, other=0)
        part = step % parts * ROWS
        head = entry // m
        query_block = entry - head * m
        at = query_block * BLOCK + part
        q = query.load([at, (key_head * GROUP + head) * D])
        do = grad_out.load([at, (key_head * GROUP + head) * D])
        row_lse = lse.load([(key_head * (GROUP * m) + entry) * BLOCK + part])
        row_delta = delta.load([(key_head * (GROUP * m) + entry) * BLOCK + part])
        scores = tl.dot(k, q.T, input_precision="ieee")
        if first_key is not None:
            cut = bound > first
            if DIAGONAL:
                cut |= query_block == block
            if cut:
                keys, rows = first + tl.arange(0, TILE)[:, None], at + tl.arange(0, ROWS)[None, :]
                hidden = keys < tl.load(begins + rows)
                if DIAGONAL:
                    hidden |= keys > rows
                scores = tl.where(hidden, float("-inf"), scores)
        elif DIAGONAL and query_block == block:
            causal = tl.arange(0, TILE)[:, None] <= at - first + tl.arange(0, ROWS)[None, :]
            scores = tl.where(causal, scores, float("-inf"))
        dk, dv = dkey_step(scores, q, v, do, row_lse, row_delta, dk, dv, qk_scale)
        entry = next_entry
        if first_key is not None:
            bound = _last_first_key(begins, entry, step + 1, steps, m, BLOCK, ROWS)

    key_heads = tl.num_programs(0) // tiles
    rows = first + tl.arange(0, TILE).to(tl.int64)
    to = rows[:, None] * (key_heads * D) + key_head * D + tl.arange(0, D)[None, :]
    tl.store(dkey + to, dk * scale)
    tl.store(dvalue + to, dv)


@triton.jit
def row_delta_kernel(grad_out, out, delta, tokens, heads, D: tl.constexpr, ROWS: tl.constexpr):
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows.to(tl.int64)[:, None] * (heads * D) + head * D + tl.arange(0, D)[None, :]
    inside = rows < tokens
    product = tl.load(grad_out + at, inside[:, None], other=0).to(tl.float32)
    product *= tl.load(out + at, inside[:, None], other=0).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * tokens + rows, tl.sum(product, 1), inside)


def row_delta(grad_out, out) -> torch.Tensor:
    """rowsum(grad_out * out), float32 [b, h, s], of two contiguous tensors [s, b, h, d]: once per layer."""
    s, b, h, d = out.shape
    delta = torch.empty(b, h, s, dtype=torch.float32, device=out.device)
    row_delta_kernel[(triton.cdiv(s, 64), b * h)](grad_out, out, delta, s, b * h, D=d, ROWS=64, num_warps=4)
    return delta


def forward(query, keys, values, tiles, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """out float32 [s, b, h, d] and lse float32 [b, h, s] of one ring step.

    query [s, b, h, d]; keys and values [t + (h / g) * c, b, g, d], the rows past t from
    vertical.gather_columns.
    """
    s, b, h, d = query.shape
    out = torch.empty(s, b, h, d, dtype=torch.float32, device=query.device)
    lse = torch.empty(b, h, s, dtype=torch.float32, device=query.device)
    rows, tile, warps, stages = fit(FORWARD, tiles, query)
    forward_kernel[(b * h * (s // rows),)](
        matrix(query, rows), matrix(keys, tile), matrix(values, tile), out, lse, **lists(tiles),
        qk_scale=scale * LOG2_E, GROUP=h // keys.shape[2], D=d, ROWS=rows, TILE=tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def backward_query(grad_out, query, keys, values, lse, delta, tiles, scale: float) -> torch.Tensor:
    """dq float32 [s, b, h, d]. lse from `base_2` and delta from `row_delta`; the others as in `forward`."""
    s, b, h, d = query.shape
    dquery = torch.empty(s, b, h, d, dtype=torch.float32, device=query.device)
    rows, tile, warps, stages = fit(BACKWARD_QUERY, tiles, query)
    dquery_kernel[(b * h * (s // rows),)](
        matrix(query, rows), matrix(keys, tile), matrix(values, tile), matrix(grad_out, rows), lse, delta,
        dquery, **lists(tiles), qk_scale=scale * LOG2_E, scale=scale, GROUP=h // keys.shape[2], D=d,
        ROWS=rows, TILE=tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dquery


def backward_key(
    grad_out, query, key, value, lse, delta, tiles, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv, float32 [t, b, g, d], of the tiles without columns; `tiles` needs its lists by key block."""
    (s, b, h, d), (t, _, g, _) = query.shape, key.shape
    dkey = torch.empty(t, b, g, d, dtype=torch.float32, device=query.device)
    dvalue = torch.empty_like(dkey)
    rows, tile, warps, stages = fit(BACKWARD_KEY, tiles, query)
    dkey_kernel[(b * g * (t // tile),)](
        matrix(query, rows), matrix(key, tile), matrix(value, tile), matrix(grad_out, rows),
        vector(lse, rows), vector(delta, rows), dkey, dvalue, tiles.key_count, tiles.key_index,
        **documents(tiles), qk_scale=scale * LOG2_E, scale=scale, m=s // tiles.block_size,
        n=t // tiles.block_size, slots=tiles.key_index.shape[-1], GROUP=h // g, D=d, BLOCK=tiles.block_size,
        ROWS=rows, TILE=tile, DIAGONAL=tiles.diagonal, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dkey, dvalue


def base_2(lse) -> torch.Tensor:
    """lse for exp2, with +inf for rows that saw nothing: their probabilities are then 0 and not NaN."""
    return torch.where(lse == -torch.inf, torch.inf, lse * LOG2_E)
