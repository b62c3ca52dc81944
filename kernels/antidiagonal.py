"""Scores of blocks from sums along antidiagonals (XAttention); every key is looked at.

Cells are `stride` tokens. The score of cells i, j is the sum of q[iS + S - 1 - x] . k[jS + x] over x: one
product of matrices of inner size S * d. Two passes over the visiting keys: `cell_mass` for the softmax of
every query cell, which the ring steps combine; then `block_scores` sums probabilities by key block.

GPU tensors go through the Triton kernels of this file, CPU tensors through torch. A tensor [s, b, h, d] is
also the matrix [s / S, S * b * h * d] of cells: a slice of the inner sum is a tile of it, reversed or not,
and nothing is copied. Scores live in registers; tiles of later keys are skipped.

Legend: S stride, G block size, s query rows, t key tokens, i = s / S query cells, m, n query, key blocks, b
batch, h query heads, g key heads, d head size. In a kernel: CELLS of a block, ROWS query and TILE key cells
of a tile, SLICE of the inner size; heads count over the batch.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .walk import LN_2, LOG2_E

# Tile (query x key cells), slice of a head, warps and pipeline stages. Measured on an H200, bfloat16, 16
# query and 2 key heads of size 128, 131072 tokens, stride 16 (2.2 TFLOP a pass), mass and scores in ms: 3.8
# and 3.4; 3.6 and 3.5 with 4 stages, 4.8 and 4.1 with 128 x 128 on 4 warps, 5.0 and 4.2 on 8, 5.1 and 3.4
# with 256 x 128. One flat loop over tiles and slices, which has to drain every product: 4.1 for the mass.
MASS = (128, 256, 64, 8, 3)
SCORES = (128, 256, 64, 8, 3)
FLOAT32 = (32, 32, 32, 4, 1)  # serves tests: plain multiply-adds
LATER = tl.constexpr(2**30)  # past every cell
BASE_2 = tl.constexpr(LOG2_E)


@triton.jit
def _reach(visible, earlier, first, cells, CELLS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Of the query cells of a tile: key cells that any of them sees, key tiles that all of them see."""
    last = tl.minimum(first + ROWS, cells) - 1
    return tl.load(visible + last // CELLS) * CELLS, tl.load(earlier + first // CELLS) * CELLS // TILE


@triton.jit
def _slices(
    step, query_head, query_heads, key_head, key_heads, S: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr
):
    """Columns of the query and key matrices in one step of the inner sum; query tokens turn round."""
    parts: tl.constexpr = D // SLICE
    x, part = step // parts, step % parts * SLICE
    return ((S - 1 - x) * query_heads + query_head) * D + part, (x * key_heads + key_head) * D + part


@triton.jit
def _hide(
    scores, query_blocks, key_blocks, first_cell, first, at, cells, key_cells,
    CELLS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """-inf where the key cell is later than the query cell, of an earlier document, or not there."""
    row, column = first + tl.arange(0, ROWS), at + tl.arange(0, TILE)
    query_cell = (
        tl.load(query_blocks + row // CELLS, mask=row < cells, other=0).to(tl.int32) * CELLS + row % CELLS
    )
    block = tl.load(key_blocks + column // CELLS, mask=column < key_cells, other=0).to(tl.int32)
    key_cell = tl.where(column < key_cells, block * CELLS + column % CELLS, LATER)
    seen = key_cell[None, :] <= query_cell[:, None]
    if DOCUMENTS:
        seen = seen & (column[None, :] >= tl.load(first_cell + row, mask=row < cells, other=0)[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def cell_mass_kernel(
    query, key, mass, query_blocks, key_blocks, visible, earlier, first_cell, qk_scale, cells, key_cells,
    key_heads, batch_heads,
    GROUP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, CELLS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Running softmax of one tile of query cells. Heads of a key head are fastest, rows that see most are
    first.
    """
    row_tiles = tl.cdiv(cells, ROWS)
    first = (row_tiles - 1 - tl.program_id(0) // GROUP % row_tiles) * ROWS
    key_head = tl.program_id(0) // (GROUP * row_tiles)
    query_head = key_head * GROUP + tl.program_id(0) % GROUP
    end, free = _reach(visible, earlier, first, cells, CELLS, ROWS, TILE)
    top = tl.full([ROWS], -1e30, tl.float32)  # finite: no -inf minus -inf
    total = tl.zeros([ROWS], tl.float32)
    begin = 0
    if DOCUMENTS:
        first_cell += query_head // batch_heads * cells
        begin, free = tl.load(first_cell + first) // TILE, 0  # rows ascend, and so do their documents
    for tile in range(begin, tl.cdiv(end, TILE)):
        scores = tl.zeros([ROWS, TILE], tl.float32)
        for step in range(S * D // SLICE):
            left, right = _slices(step, query_head, key_heads * GROUP, key_head, key_heads, S, D, SLICE)
            k = key.load([tile * TILE, right])
            scores = tl.dot(query.load([first, left]), k.T, scores, input_precision="ieee")
        if tile >= free:
            scores = _hide(
                scores, query_blocks, key_blocks, first_cell, first, tile * TILE, cells, key_cells, CELLS,
                ROWS, TILE, DOCUMENTS,
            )  # fmt: skip
        new_top = tl.maximum(top, tl.max(scores, 1) * qk_scale)
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scores * qk_scale - new_top[:, None]), 1)
        top = new_top
    rows = first + tl.arange(0, ROWS)
    natural = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * LN_2)
    tl.store(mass + query_head.to(tl.int64) * cells + rows, natural, mask=rows < cells)


@triton.jit
def block_scores_kernel(
    query, key, lse, scores_of_blocks, query_blocks, key_blocks, visible, earlier, first_cell, qk_scale,
    cells, key_cells, key_heads, batch_heads,
    GROUP: tl.constexpr, D: tl.constexpr, S: tl.constexpr, CELLS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Probabilities of one tile, summed over its block pairs.

    Heads of a key head are fastest, then key tiles: what runs at a time shares a few tiles of queries, and
    passes over the keys together.
    """
    key_tiles, row_tiles = tl.cdiv(key_cells, TILE), tl.cdiv(cells, ROWS)
    program = tl.program_id(0) // GROUP
    tile = program % key_tiles
    first = (row_tiles - 1 - program // key_tiles % row_tiles) * ROWS
    key_head = program // (key_tiles * row_tiles)
    query_head = key_head * GROUP + tl.program_id(0) % GROUP
    end, free = _reach(visible, earlier, first, cells, CELLS, ROWS, TILE)
    m, n = cells // CELLS, key_cells // CELLS
    row, column = (
        first // CELLS + tl.arange(0, ROWS // CELLS),
        tile * (TILE // CELLS) + tl.arange(0, TILE // CELLS),
    )
    to = scores_of_blocks + (query_head.to(tl.int64) * m + row[:, None]) * n + column[None, :]
    there = (row < m)[:, None] & (column < n)[None, :]
    nothing = tile * TILE >= end
    if DOCUMENTS:
        first_cell += query_head // batch_heads * cells
        nothing = nothing | ((tile + 1) * TILE <= tl.load(first_cell + first))
        free = 0
    if nothing:
        tl.store(to, tl.zeros([ROWS // CELLS, TILE // CELLS], tl.float32), mask=there)
        return
    scores = tl.zeros([ROWS, TILE], tl.float32)
    for step in range(S * D // SLICE):
        left, right = _slices(step, query_head, key_heads * GROUP, key_head, key_heads, S, D, SLICE)
        k = key.load([tile * TILE, right])
        scores = tl.dot(query.load([first, left]), k.T, scores, input_precision="ieee")
    if tile >= free:
        scores = _hide(
            scores, query_blocks, key_blocks, first_cell, first, tile * TILE, cells, key_cells, CELLS, ROWS,
            TILE, DOCUMENTS,
        )  # fmt: skip
    rows = first + tl.arange(0, ROWS)
    mass = (
        tl.load(lse + query_head.to(tl.int64) * cells + rows, mask=rows < cells, other=float("inf")) * BASE_2
    )
    p = tl.exp2(scores * qk_scale - mass[:, None])
    p = tl.sum(tl.reshape(p, [ROWS, TILE // CELLS, CELLS]), 2)
    tl.store(to, tl.sum(tl.reshape(p, [ROWS // CELLS, CELLS, TILE // CELLS]), 1), mask=there)


def cell_mass(
    query, key, query_blocks, key_blocks, *, stride: int, scale: float, first_cell=None
) -> torch.Tensor:
    """log(sum(exp(scores))) of every query cell over the visiting keys: [b, h, i], -inf where all are later.

    query [s, b, h, d], key [t, b, g, d]; query_blocks int64 [m] and key_blocks int64 [n] are global block
    ids, ascending; `scale` > 0 multiplies the antidiagonal sums. float32 (float64 for float64 inputs).
    first_cell int32 [b, i], ascending: the visiting key cells before it are of an earlier document than the
    query cell, and count for nothing.
    """
    run = cell_mass_on_triton if runs_on_triton(key, key_blocks, stride) else _cell_mass
    return run(query, key, query_blocks, key_blocks, stride, scale, first_cell)


def block_scores(
    query, key, query_blocks, key_blocks, lse, *, stride: int, scale: float, first_cell=None
) -> torch.Tensor:
    """Probability of every (query block, key block) pair, summed over its cells: [b, h, m, n].

    lse [b, h, i] is over the keys of all ranks; a cell with lse inf counts for nothing.
    """
    run = block_scores_on_triton if runs_on_triton(key, key_blocks, stride) else _block_scores
    return run(query, key, query_blocks, key_blocks, lse, stride, scale, first_cell)


def runs_on_triton(key, key_blocks, stride: int) -> bool:
    """Whether the Triton kernels take these keys; torch does the rest, and everything on a CPU."""
    per_block = len(key) // len(key_blocks) // stride
    whole_tiles = per_block in (1, 2, 4, 8, 16, 32)
    return key.is_cuda and key.dtype != torch.float64 and key.shape[-1] in (32, 64, 128) and whole_tiles


def cell_mass_on_triton(
    query, key, query_blocks, key_blocks, stride: int, scale: float, first_cell=None
) -> torch.Tensor:
    """`cell_mass` by the kernel of this file."""
    (s, b, h, _), tuned = query.shape, FLOAT32 if query.dtype == torch.float32 else MASS
    blocks = query_blocks, key_blocks
    matrices, rest, sizes = _launch(query, key, blocks, stride, scale, first_cell, tuned)
    mass = torch.empty(b, h, s // stride, dtype=torch.float32, device=query.device)
    grid = (b * h * triton.cdiv(s // stride, tuned[0]),)
    cell_mass_kernel[grid](*matrices, mass, *rest, **sizes)
    return mass


def block_scores_on_triton(  # noqa: PLR0913 - those of block_scores
    query, key, query_blocks, key_blocks, lse, stride: int, scale: float, first_cell=None
) -> torch.Tensor:
    """`block_scores` by the kernel of this file."""
    (s, b, h, _), tuned = query.shape, FLOAT32 if query.dtype == torch.float32 else SCORES
    blocks = query_blocks, key_blocks
    matrices, rest, sizes = _launch(query, key, blocks, stride, scale, first_cell, tuned)
    scores = torch.empty(b, h, len(query_blocks), len(key_blocks), dtype=torch.float32, device=query.device)
    tiles = triton.cdiv(s // stride, tuned[0]) * triton.cdiv(len(key) // stride, tuned[1])
    block_scores_kernel[(b * h * tiles,)](*matrices, lse.contiguous(), scores, *rest, **sizes)
    return scores


def _launch(query, key, blocks, stride: int, scale: float, first_cell, tuned):
    """(matrices of cells, the tensors and numbers that both kernels take, their settings)."""
    (s, b, h, d), (t, _, g, _) = query.shape, key.shape
    rows, tile, part, warps, stages = tuned
    part = min(part, d)

    def cells(tensor, count):
        return TensorDescriptor.from_tensor(
            tensor.contiguous().view(len(tensor) // stride, -1), [count, part]
        )

    query_blocks, key_blocks = blocks
    visible = torch.searchsorted(key_blocks, query_blocks, right=True).int()
    earlier = torch.searchsorted(key_blocks, query_blocks).int()
    tensors = query_blocks, key_blocks, visible, earlier, visible if first_cell is None else first_cell
    sizes = {
        "GROUP": h // g, "D": d, "S": stride, "CELLS": s // len(query_blocks) // stride, "ROWS": rows,
        "TILE": tile, "SLICE": part, "DOCUMENTS": first_cell is not None, "num_warps": warps,
        "num_stages": stages,
    }  # fmt: skip
    rest = (*tensors, scale * LOG2_E, s // stride, t // stride, b * g, h)
    return (cells(query, rows), cells(key, tile)), rest, sizes


def _cell_mass(query, key, query_blocks, key_blocks, stride: int, scale: float, first_cell) -> torch.Tensor:
    return torch.logsumexp(_cell_scores(query, key, query_blocks, key_blocks, stride, scale, first_cell), -1)


def _block_scores(  # noqa: PLR0913 - those of block_scores
    query, key, query_blocks, key_blocks, lse, stride: int, scale: float, first_cell
) -> torch.Tensor:
    scores = _cell_scores(query, key, query_blocks, key_blocks, stride, scale, first_cell)
    probability = torch.exp(scores - lse[..., None])
    m, n = len(query_blocks), len(key_blocks)
    return probability.unflatten(-1, (n, -1)).unflatten(-3, (m, -1)).sum((-1, -3))


def _cell_scores(
    query, key, query_blocks, key_blocks, stride: int, scale: float, first_cell=None
) -> torch.Tensor:
    """Scaled scores of cells [b, h, i, j], -inf where the key cell is later than the query cell, or of an
    earlier document.
    """
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    groups = key.shape[2]
    q = query.to(wide).unflatten(0, (-1, stride)).flip(1).permute(2, 3, 0, 1, 4).flatten(3)
    k = key.to(wide).unflatten(0, (-1, stride)).permute(2, 3, 0, 1, 4).flatten(3)
    scores = (q.unflatten(1, (groups, -1)).flatten(2, 3) @ k.mT).mul_(scale)
    scores = scores.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
    hidden = cells_of(key_blocks, k.shape[2]) > cells_of(query_blocks, q.shape[2])[:, None]
    if first_cell is not None:
        earlier = torch.arange(k.shape[2], device=key.device) < first_cell[..., None]
        hidden = (hidden | earlier)[:, None]
    return scores.masked_fill_(hidden, -torch.inf)


def cells_of(blocks, count: int) -> torch.Tensor:
    """Global ids of the cells of `blocks`, `count` in all."""
    per_block = count // len(blocks)
    return (blocks[:, None] * per_block + torch.arange(per_block, device=blocks.device)).flatten()
