"""Attention over lists of tiles, forward and backward, in Triton: one ring step of a block-sparse mask.

query and grad_out are [s, b, h, d], key and value [t, b, g, d]: the matrices [s, b * h * d] and [t, b * g * d], out
of which a tensor descriptor takes the tile of any head without a permutation. The backward is two kernels without
atomics, so two runs agree in every bit: dQ walks the forward's list of a query block, dK and dV the transposed list
of a key block, which holds all query heads of its key head, so that nothing is left to reduce.

A block is walked in tiles of `TILE` keys. Columns (vertical.py) are rows behind the keys, `gathered` of them for every
query head, and a tile of columns is one more step of the same walk: only its scores pay for the visibility bits. The
tile on the diagonal is taken apart from the others: only it pays for the causal mask.

Legend: b batch, s query tokens, t key tokens, h query heads, g key heads, d head size, m, n query, key blocks,
c column slots of a query head; D, BLOCK, ROWS (queries), TILE (keys) their sizes in a kernel.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

# Largest tile (queries x keys), warps and pipeline stages, for 16 bits. Measured on an H200 at head size 128, bfloat16,
# 131072 tokens, 5.4 % of the tiles, in ms: forward 8.0; 9.3 with 64 queries or 8 warps, 9.4 with 3 stages. dQ 9.9; 10.1
# with 64 queries, 10.9 with 2 stages. dK and dV 13.6; 14.3 with 128 keys and 8 warps, 17.4 with 3 stages.
FORWARD = (128, 64, 4, 2)
BACKWARD_QUERY = (128, 64, 8, 4)
BACKWARD_KEY = (64, 64, 4, 2)
# float32 serves tests: plain multiply-adds instead of the matrix units, and operands of twice the size.
FLOAT32 = (32, 32, 4, 1)


@triton.jit
def settle(x):
    """x itself, and the matrix product that makes it finished: no instruction, but a use of every element.

    Triton leaves a product that only feeds the next iteration in flight across the loop's back edge. Where the loop
    has a branch, ptxas then has to move its accumulators and serialises every product of the kernel (warning C7515):
    9.1 ms instead of 8.0 in the forward.
    """
    if COMPILED:
        x = tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def in_registers(x, D: tl.constexpr):
    """x itself, as a left operand that lives in registers: what a product returns is not put into shared memory.

    Two warpgroups that read both operands of 64 x 64 products from shared memory exhaust its bandwidth: dQ takes 14.7 ms
    instead of 16.0 at 8 % density. The product with the identity is exact.
    """
    at = tl.arange(0, D)
    if COMPILED:
        x = tl.dot(x, (at[:, None] == at[None, :]).to(x.dtype), input_precision="ieee").to(x.dtype)
    return x


@triton.jit
def _key_row(ids, step, listed, behind, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """First key row of a step: a part of a listed block or, past the list, a tile of gathered columns."""
    parts: tl.constexpr = BLOCK // TILE
    block = tl.load(ids + step // parts, mask=step < listed, other=0)
    return tl.where(step < listed, block * BLOCK + step % parts * TILE, behind + step * TILE)


@triton.jit
def _words(visible, slot, wanted, TILE: tl.constexpr):
    """The visibility bits of the slots from `slot` on, in one or two words."""
    low = tl.load(visible + slot // 32, mask=wanted, other=-1)
    high = low
    if TILE == 64:
        high = tl.load(visible + slot // 32 + 1, mask=wanted, other=-1)
    else:
        low = low >> (slot % 32)
    return low, high


@triton.jit
def _seen(low, high, TILE: tl.constexpr):
    """The bits of `_words` as bool [TILE]."""
    slot = tl.arange(0, TILE)
    return (tl.where(slot < 32, low, high) >> (slot % 32)) & 1 != 0


@triton.jit
def _row_program(m, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(key head, query head, query block, first row): key heads slowest, their query heads fastest, last rows first.

    The heads of a key head then share its keys in the L2, and the longest rows of a causal mask do not come last.
    Heads count over the batch. 14 % faster than interleaved key heads.
    """
    rows = m * (BLOCK // ROWS)
    program = tl.program_id(0)
    row = rows - 1 - program // GROUP % rows
    key_head = program // (GROUP * rows)
    query_head = key_head * GROUP + program % GROUP
    return key_head, query_head, row * ROWS // BLOCK, row * ROWS


@triton.jit
def _walk(block_count, block_index, limit, row, block, n, COLUMNS: tl.constexpr, DIAGONAL: tl.constexpr,
          BLOCK: tl.constexpr, TILE: tl.constexpr):
    """What a query block walks: its list, the steps without a mask, those of listed blocks, and all of them."""
    ids = block_index + row.to(tl.int64) * n
    count = tl.load(block_count + row)
    listed = count * (BLOCK // TILE)
    plain = listed
    if DIAGONAL:
        plain -= (tl.load(ids + count - 1, mask=count > 0, other=-1) == block).to(tl.int32) * (BLOCK // TILE)
    steps = listed
    if COLUMNS:
        steps += tl.cdiv(tl.load(limit + row), TILE)
    return ids, plain, listed, steps


@triton.jit
def _mask(scores, step, plain, listed, at, low, high, COLUMNS: tl.constexpr, DIAGONAL: tl.constexpr, ROWS: tl.constexpr,
          TILE: tl.constexpr):
    """Hides the later keys of a diagonal tile, whose first key is `at` past the first query, and unseen columns.

    One branch for both: two cost 9 % of the forward, and masking every tile 25 %.
    """
    key = at + tl.arange(0, TILE)
    query = tl.arange(0, ROWS)
    if DIAGONAL and COLUMNS:
        if step >= plain:
            key = tl.where(step < listed, key, -(2**30))
            key = tl.where(_seen(low, high, TILE), key, 2**30)
            scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
    elif DIAGONAL:
        if step >= plain:
            scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
    elif COLUMNS:
        if step >= plain:
            scores = tl.where(_seen(low, high, TILE)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _softmax_step(scores, v, top, total, acc, qk_scale):
    """Adds the keys of one tile to the running softmax of every row. `top` starts finite: no -inf minus -inf."""
    new_top = tl.maximum(top, tl.max(scores, 1) * qk_scale)
    p = tl.exp2(scores * qk_scale - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(p, 1)
    acc = settle(tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee"))
    return new_top, total, acc


@triton.jit
def forward_kernel(query, key, value, out, lse, block_count, block_index, limit, visible, qk_scale, m, n, c,
                   GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
                   DIAGONAL: tl.constexpr, COLUMNS: tl.constexpr):
    key_head, query_head, block, first = _row_program(m, GROUP, BLOCK, ROWS)
    row = query_head * m + block
    ids, plain, listed, steps = _walk(block_count, block_index, limit, row, block, n, COLUMNS, DIAGONAL, BLOCK, TILE)
    behind = n * BLOCK + query_head % GROUP * c - listed * TILE
    words = visible + row.to(tl.int64) * (c // 32)

    q = query.load([first, query_head * D])
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    rows = first + tl.arange(0, ROWS)

    # The next row is carried along: with the list read inside the iteration that uses it, the pipeliner allocates
    # two buffers whatever num_stages is, and the loads start late.
    at = _key_row(ids, 0, listed, behind, BLOCK, TILE)
    low, high = 0, 0
    if COLUMNS:
        low, high = _words(words, 0, listed < 1, TILE)
    for step in range(steps):
        next_at = _key_row(ids, step + 1, listed, behind, BLOCK, TILE)
        scores = tl.dot(q, key.load([at, key_head * D]).T, input_precision="ieee")
        scores = _mask(scores, step, plain, listed, at - first, low, high, COLUMNS, DIAGONAL, ROWS, TILE)
        if COLUMNS:
            next_step = step + 1
            low, high = _words(words, (next_step - listed) * TILE, (next_step >= listed) & (next_step < steps), TILE)
        v = value.load([at, key_head * D])
        top, total, acc = _softmax_step(scores, v, top, total, acc, qk_scale)
        at = next_at

    heads = tl.num_programs(0) // (m * (BLOCK // ROWS))
    tokens = m * BLOCK
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    to = rows.to(tl.int64)[:, None] * (heads * D) + query_head * D + tl.arange(0, D)[None, :]
    tl.store(out + to, acc)
    natural = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN_2)
    tl.store(lse + query_head.to(tl.int64) * tokens + rows, natural)


@triton.jit
def _dquery_step(q, k, v, do, lse, delta, scores, acc, qk_scale):
    """Adds dS K of one tile to dQ; `lse` is in base 2."""
    dp = tl.dot(do, v.T, input_precision="ieee")
    p = tl.exp2(scores * qk_scale - lse[:, None])
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")


@triton.jit
def dquery_kernel(query, key, value, grad_out, lse, delta, dquery, block_count, block_index, limit, visible, qk_scale,
                  scale, m, n, c, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
                  ROWS: tl.constexpr, TILE: tl.constexpr, DIAGONAL: tl.constexpr, COLUMNS: tl.constexpr):
    key_head, query_head, block, first = _row_program(m, GROUP, BLOCK, ROWS)
    row = query_head * m + block
    ids, plain, listed, steps = _walk(block_count, block_index, limit, row, block, n, COLUMNS, DIAGONAL, BLOCK, TILE)
    behind = n * BLOCK + query_head % GROUP * c - listed * TILE
    words = visible + row.to(tl.int64) * (c // 32)

    q = in_registers(query.load([first, query_head * D]), D)
    do = in_registers(grad_out.load([first, query_head * D]), D)
    rows = first + tl.arange(0, ROWS)
    row_lse = tl.load(lse + query_head.to(tl.int64) * (m * BLOCK) + rows)
    row_delta = tl.load(delta + query_head.to(tl.int64) * (m * BLOCK) + rows)
    acc = tl.zeros([ROWS, D], tl.float32)

    at = _key_row(ids, 0, listed, behind, BLOCK, TILE)
    low, high = 0, 0
    if COLUMNS:
        low, high = _words(words, 0, listed < 1, TILE)
    for step in range(steps):
        next_at = _key_row(ids, step + 1, listed, behind, BLOCK, TILE)
        k = key.load([at, key_head * D])
        v = value.load([at, key_head * D])
        scores = tl.dot(q, k.T, input_precision="ieee")
        scores = _mask(scores, step, plain, listed, at - first, low, high, COLUMNS, DIAGONAL, ROWS, TILE)
        if COLUMNS:
            next_step = step + 1
            low, high = _words(words, (next_step - listed) * TILE, (next_step >= listed) & (next_step < steps), TILE)
        acc = _dquery_step(q, k, v, do, row_lse, row_delta, scores, acc, qk_scale)
        at = next_at

    heads = tl.num_programs(0) // (m * (BLOCK // ROWS))
    to = rows.to(tl.int64)[:, None] * (heads * D) + query_head * D + tl.arange(0, D)[None, :]
    tl.store(dquery + to, acc * scale)


@triton.jit
def dkey_step(scores, q, v, do, lse, delta, dk, dv, qk_scale):
    """Adds one tile of transposed scores [keys, queries] to dK (without the scale) and dV; `lse` is in base 2.

    Both products that need only the inputs come first: the other order took 6 to 10 % longer.
    """
    dp = tl.dot(v, do.T, input_precision="ieee")
    p = tl.exp2(scores * qk_scale - lse[None, :])
    ds = p * (dp - delta[None, :])
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return settle(dk), settle(dv)


@triton.jit
def dkey_kernel(query, key, value, grad_out, lse, delta, dkey, dvalue, key_count, key_index, qk_scale, scale, m, n,
                GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
                DIAGONAL: tl.constexpr):
    parts: tl.constexpr = BLOCK // ROWS
    tiles = n * (BLOCK // TILE)
    key_head = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TILE
    block = first // BLOCK
    row = key_head * n + block
    ids = key_index + row.to(tl.int64) * (GROUP * m)
    steps = tl.load(key_count + row) * parts

    k = key.load([first, key_head * D])
    v = value.load([first, key_head * D])
    dk = tl.zeros([TILE, D], tl.float32)
    dv = tl.zeros([TILE, D], tl.float32)
    entry = tl.load(ids, mask=steps > 0, other=0)
    for step in range(steps):
        next_entry = tl.load(ids + (step + 1) // parts, mask=step + 1 < steps, other=0)
        query_head = key_head * GROUP + entry // m
        query_block = entry % m
        at = query_block * BLOCK + step % parts * ROWS
        q = query.load([at, query_head * D])
        do = grad_out.load([at, query_head * D])
        row_lse = lse.load([query_head * (m * BLOCK) + at])
        row_delta = delta.load([query_head * (m * BLOCK) + at])
        scores = tl.dot(k, q.T, input_precision="ieee")
        if DIAGONAL:
            if query_block == block:
                causal = tl.arange(0, TILE)[:, None] <= at - first + tl.arange(0, ROWS)[None, :]
                scores = tl.where(causal, scores, float("-inf"))
        dk, dv = dkey_step(scores, q, v, do, row_lse, row_delta, dk, dv, qk_scale)
        entry = next_entry

    heads = tl.num_programs(0) // tiles
    rows = first + tl.arange(0, TILE).to(tl.int64)
    to = rows[:, None] * (heads * D) + key_head * D + tl.arange(0, D)[None, :]
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
    """rowsum(grad_out * out), both [s, b, h, d] and contiguous, as float32 [b, h, s]: once per layer, for all steps."""
    s, b, h, d = out.shape
    delta = torch.empty(b, h, s, dtype=torch.float32, device=out.device)
    row_delta_kernel[(triton.cdiv(s, 64), b * h)](grad_out, out, delta, s, b * h, D=d, ROWS=64, num_warps=4)
    return delta


def forward(query, keys, values, tiles, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """out float32 [s, b, h, d] and lse float32 [b, h, s] of one ring step.

    query [s, b, h, d]; keys and values [t + (h / g) * c, b, g, d], the rows past t from vertical.gather_columns.
    """
    s, b, h, d = query.shape
    out = torch.empty(s, b, h, d, dtype=torch.float32, device=query.device)
    lse = torch.empty(b, h, s, dtype=torch.float32, device=query.device)
    rows, tile, warps, stages = fit(FORWARD, tiles, query)
    forward_kernel[(b * h * (s // rows),)](
        matrix(query, rows), matrix(keys, tile), matrix(values, tile), out, lse, **_lists(tiles),
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
        matrix(query, rows), matrix(keys, tile), matrix(values, tile), matrix(grad_out, rows), lse, delta, dquery,
        **_lists(tiles), qk_scale=scale * LOG2_E, scale=scale, GROUP=h // keys.shape[2], D=d,
        ROWS=rows, TILE=tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dquery


def backward_key(grad_out, query, key, value, lse, delta, tiles, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv float32 [t, b, g, d] of the tiles, without the columns. Needs the lists by key block in `tiles`."""
    (s, b, h, d), (t, _, g, _) = query.shape, key.shape
    dkey = torch.empty(t, b, g, d, dtype=torch.float32, device=query.device)
    dvalue = torch.empty_like(dkey)
    rows, tile, warps, stages = fit(BACKWARD_KEY, tiles, query)
    dkey_kernel[(b * g * (t // tile),)](
        matrix(query, rows), matrix(key, tile), matrix(value, tile), matrix(grad_out, rows), vector(lse, rows),
        vector(delta, rows), dkey, dvalue, tiles.key_count, tiles.key_index, qk_scale=scale * LOG2_E, scale=scale,
        m=s // tiles.block_size, n=t // tiles.block_size, GROUP=h // g, D=d, BLOCK=tiles.block_size, ROWS=rows,
        TILE=tile, DIAGONAL=tiles.diagonal, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dkey, dvalue


def base_2(lse) -> torch.Tensor:
    """lse for exp2, with +inf for rows that saw nothing: their probabilities are then 0 and not NaN."""
    return torch.where(lse == -torch.inf, torch.inf, lse * LOG2_E)


def fit(tuned, tiles, query) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of a kernel for these blocks and this dtype."""
    rows, tile, warps, stages = FLOAT32 if query.dtype == torch.float32 else tuned
    return min(rows, tiles.block_size), min(tile, tiles.block_size), warps, stages


def matrix(tensor, rows: int) -> TensorDescriptor:
    """[s, b, h, d] as the matrix [s, b * h * d], read in tiles of `rows` tokens of one head."""
    return TensorDescriptor.from_tensor(tensor.view(len(tensor), -1), [rows, tensor.shape[-1]])


def vector(tensor, rows: int) -> TensorDescriptor:
    """[b, h, s] as one vector, read in pieces of `rows` tokens."""
    return TensorDescriptor.from_tensor(tensor.view(-1), [rows])


def _lists(tiles) -> dict:
    """The arguments of a kernel over query blocks that come out of `tiles`."""
    count, index, columns = tiles.block_count, tiles.block_index, tiles.columns
    return {
        "block_count": count,
        "block_index": index,
        "limit": count if columns is None else columns.limit,
        "visible": count if columns is None else columns.visible,
        "m": index.shape[2],
        "n": index.shape[3],
        "c": 0 if columns is None else columns.index.shape[-1],
        "BLOCK": tiles.block_size,
        "DIAGONAL": tiles.diagonal,
        "COLUMNS": columns is not None,
    }
