"""How a program of the kernels walks its list: the order of programs, the rows of a step, and its mask.

Also what the kernels over tiles share: the operands of a product, tile sizes and tensor descriptors.

Legend: b batch, s query tokens, t key tokens, h query heads, g key heads, d head size, m, n query, key
blocks, c column slots of a query head. In a kernel: D head size, GROUP h / g, BLOCK tokens of a block, ROWS
queries and TILE keys of a tile; ROWS and TILE divide BLOCK. Heads count over the batch there.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

# The compiler that these kernels' machine code was checked with (tests/kernels/test_compile.py).
CHECKED = tl.constexpr(COMPILED and triton.__version__.startswith("3.6."))

# float32 serves tests: plain multiply-adds instead of the matrix units, and operands of twice the size.
FLOAT32 = (32, 32, 4, 1)


@triton.jit
def settle(x):
    """x itself, once the matrix product that makes it has finished: a use of every element, no instruction.

    Triton leaves a product that only feeds the next iteration in flight across the loop's back edge. In a
    loop with a branch ptxas then moves accumulators, and serialises every product of the kernel (warning
    C7515): 9.1 ms instead of 8.0 in the forward.
    """
    if COMPILED:
        x = tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def in_registers(x, D: tl.constexpr):
    """x itself, as a left operand in registers: Triton keeps there what a product returns.

    Reading both operands of 64 x 64 products from shared memory exhausts its bandwidth: dQ takes 14.4 ms
    instead of 15.6 at 8 % density. The product with the identity is exact. Only for the head size where it
    pays, and the checked compiler: at 64, where the identity's accumulators look like those of dP, ptxas 12.8
    gives the operand's registers to dS inside the loop, and dQ is wrong.
    """
    at = tl.arange(0, D)
    if CHECKED and D == 128 and x.dtype != tl.float32:
        x = tl.dot(x, (at[:, None] == at[None, :]).to(x.dtype), input_precision="ieee").to(x.dtype)
    return x


@triton.jit
def key_row(ids, step, listed, behind, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """First key row of a step: a part of a listed block or, past the list, a tile of columns.

    `behind` is where the columns lie, less the listed keys.
    """
    parts: tl.constexpr = BLOCK // TILE
    block = tl.load(ids + step // parts, mask=step < listed, other=0)
    return tl.where(step < listed, block * BLOCK + step % parts * TILE, behind + step * TILE)


@triton.jit
def words(visible, slot, wanted, TILE: tl.constexpr):
    """The visibility bits of the slots from `slot` on, in one or two words."""
    low = tl.load(visible + slot // 32, mask=wanted, other=-1)
    high = low
    if TILE == 64:
        high = tl.load(visible + slot // 32 + 1, mask=wanted, other=-1)
    else:
        low = low >> (slot & 31)
    return low, high


@triton.jit
def step_words(visible, step, listed, steps, TILE: tl.constexpr):
    """The visibility bits of a step, all set where it is not one of the columns."""
    return words(visible, (step - listed) * TILE, (step >= listed) & (step < steps), TILE)


@triton.jit
def seen(low, high, TILE: tl.constexpr):
    """The bits of `words` as bool [TILE]."""
    slot = tl.arange(0, TILE)
    return (tl.where(slot < 32, low, high) >> (slot % 32)) & 1 != 0


@triton.jit
def row_program(m, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(key head, query head, query block, first row): key heads slowest, query heads fastest, last rows
    first.

    The heads of a key head then share its keys in the L2, and the longest rows of a causal mask do not come
    last: 14 % faster than with interleaved key heads.
    """
    rows = m * (BLOCK // ROWS)
    program = tl.program_id(0)
    row = rows - 1 - program // GROUP % rows
    key_head = program // (GROUP * rows)
    query_head = key_head * GROUP + program % GROUP
    return key_head, query_head, row * ROWS // BLOCK, row * ROWS


@triton.jit
def _late_start(
    first_key, first_slot, query_head, heads, tokens, first, keys, columns, slots,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What documents hide from the ROWS rows from `first` on: (`late` of `mask`, columns that no row sees).

    `late` is 0 without documents, else: where the rows' first keys are; the largest of them, the last;
    where their first slots are; the number of listed keys and the row of slot 0. Of `slots` columns to walk,
    those that no row sees are whole tiles.
    """
    late, skipped = 0, 0
    if first_key is not None:
        begins = first_key + (query_head // heads).to(tl.int64) * tokens + first
        slot_begins = begins
        if COLUMNS:
            slot_begins = first_slot + query_head.to(tl.int64) * tokens + first
            skipped = tl.minimum(tl.load(slot_begins), slots) // 64 * 64
        late = (begins, tl.load(begins + ROWS - 1), slot_begins, keys, columns)
    return late, skipped


@triton.jit
def walk(
    block_count, block_index, limit, visible, first_slot, first_key, heads, query_head, block, first, m, n, c,
    COLUMNS: tl.constexpr, DIAGONAL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the ROWS rows from `first` on walk: their list; their steps without a mask, of listed blocks, and
    all; `behind` of key_row, where the bits of their columns begin, and `late` of mask.
    """
    row = query_head * m + block
    ids = block_index + row.to(tl.int64) * n
    count = tl.load(block_count + row)
    listed = count * (BLOCK // TILE)
    plain = listed
    if DIAGONAL:
        plain -= (tl.load(ids + count - 1, mask=count > 0, other=-1) == block).to(tl.int32) * (BLOCK // TILE)
    steps = listed
    if COLUMNS:
        steps += tl.cdiv(tl.load(limit + row), TILE)
    columns = n * BLOCK + query_head % GROUP * c
    late, skipped = _late_start(
        first_key, first_slot, query_head, heads, m * BLOCK, first, n * BLOCK, columns,
        (steps - listed) * TILE, ROWS, COLUMNS,
    )  # fmt: skip
    steps -= skipped // TILE
    behind = columns + skipped - listed * TILE
    bits = visible + row.to(tl.int64) * (c // 32) + skipped // 32
    return ids, plain, listed, steps, behind, bits, late


@triton.jit
def mask(
    scores, step, plain, listed, at, first, low, high, late,
    DOCUMENTS: tl.constexpr, COLUMNS: tl.constexpr, DIAGONAL: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Hides the later keys of a diagonal tile, unseen columns, and the keys before a row's document.

    The tile begins at row `at` of the keys, the queries at row `first`. One branch for all: two cost 9 % of
    the forward, and masking every tile 25 %.
    """
    if DOCUMENTS:
        scores = _mask_documents(scores, at, first, low, high, late, COLUMNS, DIAGONAL, ROWS, TILE)
    else:
        key = at - first + tl.arange(0, TILE)
        query = tl.arange(0, ROWS)
        if DIAGONAL and COLUMNS:
            if step >= plain:
                key = tl.where(step < listed, key, -(2**30))
                key = tl.where(seen(low, high, TILE), key, 2**30)
                scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
        elif DIAGONAL and step >= plain:
            scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
        elif COLUMNS and step >= plain:
            scores = tl.where(seen(low, high, TILE)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _mask_documents(
    scores, at, first, low, high, late,
    COLUMNS: tl.constexpr, DIAGONAL: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`mask` with documents. A row keeps what it sees of the tile in two words of bits: comparing positions
    takes 20 registers more, which the forward does not have.
    """
    begins, bound, slot_begins, keys, columns = late
    cut = at < bound
    if DIAGONAL:
        cut |= at > first - TILE
    elif COLUMNS:
        cut |= at >= keys
    if cut:
        if COLUMNS:
            begins = tl.where(at < keys, begins, slot_begins)
            at = tl.where(at < keys, at, at - columns)
        row = tl.arange(0, ROWS)
        begin = tl.load(begins + row) - at
        left, right = low & _bits_from(begin), high & _bits_from(begin - 32)
        if DIAGONAL:
            # The key of a slot is not before it: of a column in an earlier block, this hides nothing.
            end = first - at + row + 1
            left, right = left & ~_bits_from(end), right & ~_bits_from(end - 32)
        bit = tl.arange(0, TILE)[None, :]
        word = tl.where(bit < 32, left[:, None], right[:, None])
        scores = tl.where((word >> (bit % 32)) & 1 != 0, scores, float("-inf"))
    return scores


@triton.jit
def _bits_from(bit):
    """Words whose bits from `bit` on are set."""
    return tl.where(bit < 32, (bit * 0 - 1) << tl.minimum(tl.maximum(bit, 0), 31), 0)


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


def documents(tiles) -> dict:
    """The arguments of a kernel that hides the keys before a row's document; None where there are none."""
    if tiles.first_key is None:
        return {"first_key": None, "heads": None}
    return {"first_key": tiles.first_key, "heads": tiles.block_count.shape[1]}


def lists(tiles) -> dict:
    """The arguments of a kernel over query blocks that come out of `tiles`."""
    count, index, columns = tiles.block_count, tiles.block_index, tiles.columns
    return {
        "block_count": count,
        "block_index": index,
        "limit": count if columns is None else columns.limit,
        "visible": count if columns is None else columns.visible,
        "first_slot": None if columns is None else columns.first_slot,
        **documents(tiles),
        "m": index.shape[2],
        "n": index.shape[3],
        "c": 0 if columns is None else columns.index.shape[-1],
        "BLOCK": tiles.block_size,
        "DIAGONAL": tiles.diagonal,
        "COLUMNS": columns is not None,
    }
