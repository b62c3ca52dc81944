"""Which chunk of keys a query row goes to (MoBA): gate, choice, and the rows of every chunk.

GPU tensors go through the Triton kernels of this file, CPU tensors through torch. The gate is exact to
float32: the means are the sum of three bfloat16 numbers, whose products with a bfloat16 query are exact,
and the matrix units add in float32; other dtypes multiply in float32.

Legend: b batch, h query heads, g key heads, d head size, s query rows, t key tokens, c chunks, k choices of
a row, m query blocks, w = ceil(c / 32) words.
"""

import torch
import triton
import triton.language as tl

from .reference import pack_bits, unpack_bits

ROWS = 4096  # query rows gated at a time in torch: 16 heads and 256 chunks then take 64 MB
MOST_CHUNKS = 512  # the gates of a tile of rows are held in registers
# On an H200, 524288 rows, 16 heads, 128 chunks, 11 choices: choice 6.7 ms, count 0.6, place 2.6; 131072
# rows and 32 chunks: 0.3, 0.04 and 0.2.
SEGMENT = 256  # rows whose place in the lists a program computes together
PARTS = 3  # bfloat16 numbers of 8 bits whose sum is a float32 mean


@triton.jit
def choose_chunks_kernel(
    query, means, chunk_of_block, first_chunk, chosen, tokens, heads, batch_heads, chunks, choices,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr,
    WORDS: tl.constexpr, PARTS: tl.constexpr, SLICE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The bits of one tile of rows of one head: means [PARTS, b * g, c, d], see `choose_chunks`."""
    head = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    ids = tl.arange(0, CHUNKS)
    own = tl.load(chunk_of_block + first // BLOCK).to(tl.int32)
    taken = tl.broadcast_to((ids < own)[None, :], [ROWS, CHUNKS])
    if DOCUMENTS:
        low = tl.load(first_chunk + head // batch_heads * tokens + rows)
        taken = taken & (ids[None, :] >= low[:, None])
    if own > choices:
        gate = tl.zeros([ROWS, CHUNKS], tl.float32)
        for part in range(PARTS):
            side = means + ((part * (heads // GROUP) + head // GROUP) * chunks) * D
            for at in range(0, D, SLICE):
                column = at + tl.arange(0, SLICE)
                q = tl.load(query + (rows.to(tl.int64)[:, None] * heads + head) * D + column[None, :])
                mean = tl.load(
                    side + ids[None, :] * D + column[:, None], mask=(ids < chunks)[None, :], other=0.0
                )
                gate = tl.dot(q.to(mean.dtype), mean, gate, input_precision="ieee")
        gate = tl.where(taken, gate, float("-inf"))
        for _ in range(choices):
            best = tl.max(gate, 1)
            at_best = tl.min(tl.where(gate == best[:, None], ids[None, :], CHUNKS), 1)
            gate = tl.where(ids[None, :] == at_best[:, None], float("-inf"), gate)
        taken = taken & (gate == float("-inf"))
    bits = tl.reshape(taken.to(tl.int32), [ROWS, WORDS, 32]) << tl.arange(0, 32)[None, None, :]
    word = tl.arange(0, WORDS)[None, :]
    words = (chunks + 31) // 32
    to = (head.to(tl.int64) * words + word) * tokens + rows[:, None]
    tl.store(chosen + to, tl.sum(bits, 2), mask=word < words)


@triton.jit
def _taken(chosen, head, words, word, tokens, rows):
    """The bits of one word of some rows: int32 [32, rows]."""
    bits = tl.load(chosen + (head.to(tl.int64) * words + word) * tokens + rows, mask=rows < tokens, other=0)
    return (bits[None, :] >> tl.arange(0, 32)[:, None]) & 1


@triton.jit
def count_rows_kernel(chosen, count, tokens, chunks, segments, SEGMENT: tl.constexpr):
    """count[head, chunk, segment] = rows of the segment that chose the chunk."""
    segment, head = tl.program_id(0), tl.program_id(1)
    words = (chunks + 31) // 32
    for word in range(words):
        taken = _taken(chosen, head, words, word, tokens, segment * SEGMENT + tl.arange(0, SEGMENT))
        chunk = word * 32 + tl.arange(0, 32)
        to = (head.to(tl.int64) * chunks + chunk) * segments + segment
        tl.store(count + to, tl.sum(taken, 1), mask=chunk < chunks)


@triton.jit
def place_rows_kernel(chosen, before, row_index, tokens, chunks, segments, entries, SEGMENT: tl.constexpr):
    """Writes the rows of one segment behind those of the earlier segments, chunk by chunk."""
    segment, head = tl.program_id(0), tl.program_id(1)
    words = (chunks + 31) // 32
    rows = segment * SEGMENT + tl.arange(0, SEGMENT)
    for word in range(words):
        taken = _taken(chosen, head, words, word, tokens, rows)
        chunk = word * 32 + tl.arange(0, 32)
        at = (head.to(tl.int64) * chunks + chunk) * segments + segment
        place = tl.load(before + at, mask=chunk < chunks, other=0)[:, None] + tl.cumsum(taken, 1) - 1
        to = row_index + head.to(tl.int64) * entries + place
        tl.store(to, tl.broadcast_to(rows[None, :], [32, SEGMENT]), mask=taken > 0)


def chunk_sums(key, chunk_of_block, chunks: int, block_size: int) -> torch.Tensor:
    """Sum of the keys of every chunk: float32 [c, b, g, d] (float64 for float64 keys).

    key [t, b, g, d]; chunk_of_block int64 [t / block_size], ascending, is the chunk of every local block.
    """
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    per_block = key.unflatten(0, (-1, block_size)).sum(1, dtype=wide)
    running = torch.nn.functional.pad(per_block.cumsum(0, dtype=torch.float64), (0, 0, 0, 0, 0, 0, 1, 0))
    borders = torch.searchsorted(chunk_of_block, torch.arange(chunks + 1, device=key.device))
    return (running[borders[1:]] - running[borders[:-1]]).to(wide)


def choose_chunks(
    query, means, chunk_of_block, choices: int, block_size: int, first_chunk=None
) -> torch.Tensor:
    """The `choices` highest gates of every row among the chunks before its own, as bits: int32 [b, h, w, s].

    query [s, b, h, d], means [c, b, g, d], chunk_of_block int64 [m] of the query blocks. gate = q . mean in
    float32 (float64 for float64 queries); ties go to the lower chunk; a row with fewer chunks before its
    own takes all. first_chunk int32 [b, s]: no chunk before it competes for a row (documents).
    """
    fits = means.dtype == torch.float32 and query.shape[-1] in (32, 64, 128) and len(means) <= MOST_CHUNKS
    if query.is_cuda and fits and block_size % 16 == 0:
        return choose_chunks_on_triton(query, means, chunk_of_block, choices, block_size, first_chunk)
    return choose_chunks_by_sorting(query, means, chunk_of_block, choices, block_size, first_chunk)


def choose_chunks_by_sorting(
    query, means, chunk_of_block, choices: int, block_size: int, first_chunk=None
) -> torch.Tensor:
    """`choose_chunks` by its definition."""
    chunks, groups = means.shape[0], means.shape[2]
    words = -(-chunks // 32)
    chosen = torch.empty(*query.shape[1:3], words, query.shape[0], dtype=torch.int32, device=query.device)
    own = chunk_of_block.repeat_interleave(block_size, output_size=query.shape[0])
    ids = torch.arange(chunks, device=query.device)
    for first in range(0, query.shape[0], ROWS):
        rows = slice(first, first + ROWS)
        q = query[rows].to(means.dtype).permute(1, 2, 0, 3).unflatten(1, (groups, -1))
        gate = torch.einsum("bgrsd,cbgd->bgrsc", q, means).flatten(1, 2)
        past = ids < own[rows, None]
        if first_chunk is not None:
            past = past & (ids >= first_chunk[:, None, rows, None])
        order = torch.sort(gate.masked_fill_(~past, -torch.inf), dim=-1, descending=True, stable=True).indices
        taken = torch.zeros(*gate.shape[:-1], words * 32, dtype=torch.bool, device=query.device)
        taken.scatter_(-1, order[..., :choices], True)
        taken[..., :chunks] &= past
        chosen[..., rows] = pack_bits(taken).transpose(-1, -2)
    return chosen


def choose_chunks_on_triton(
    query, means, chunk_of_block, choices: int, block_size: int, first_chunk=None
) -> torch.Tensor:
    """`choose_chunks` for up to MOST_CHUNKS chunks; the gates never leave the registers."""
    (s, b, h, d), (chunks, _, g, _) = query.shape, means.shape
    words = triton.cdiv(chunks, 32)
    padded = 32 * triton.next_power_of_2(words)
    means = means.permute(1, 2, 0, 3).contiguous()
    parts = _in_bfloat16(means) if query.dtype == torch.bfloat16 else means[None]
    chosen = torch.empty(b, h, words, s, dtype=torch.int32, device=query.device)
    rows = min(128 if padded <= 64 else 64, block_size & -block_size)
    choose_chunks_kernel[(s // rows, b * h)](
        query.contiguous(), parts, chunk_of_block, chosen if first_chunk is None else first_chunk, chosen, s,
        b * h, h, chunks, choices, GROUP=h // g, D=d, BLOCK=block_size, ROWS=rows, CHUNKS=padded,
        WORDS=padded // 32, PARTS=len(parts), SLICE=32, DOCUMENTS=first_chunk is not None,
        num_warps=8 if padded > 256 else 4,
    )  # fmt: skip
    return chosen


def _in_bfloat16(means) -> torch.Tensor:
    """float32 means as the sum of bfloat16 numbers, [PARTS, ...]; held in float32 where Triton is
    interpreted.
    """
    parts = torch.empty(PARTS, *means.shape, dtype=torch.bfloat16, device=means.device)
    for part in parts:
        part.copy_(means)
        means = means - part
    return parts.float() if triton.knobs.runtime.interpret else parts


def route_rows(chosen, chunks: int, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of every chunk: (row_start int32 [b, h, c + 1], row_index int32 [b, h, s * choices]), see
    Routes.
    """
    return (route_rows_on_triton if chosen.is_cuda else route_rows_by_scatter)(chosen, chunks, choices)


def route_rows_by_scatter(chosen, chunks: int, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_rows` in torch, through the place of every (chunk, row)."""
    b, h, _, s = chosen.shape
    taken = unpack_bits(chosen.transpose(-1, -2))[..., :chunks].transpose(-1, -2)
    count = taken.sum(-1, dtype=torch.int32)
    row_start = torch.nn.functional.pad(count.cumsum(-1, dtype=torch.int32), (1, 0))
    index = torch.zeros(b, h, s * choices + 1, dtype=torch.int32, device=chosen.device)
    place = torch.where(taken, row_start[..., :-1, None] + taken.cumsum(-1) - 1, s * choices)
    rows = torch.arange(s, dtype=torch.int32, device=chosen.device)
    index.scatter_(-1, place.flatten(-2), rows.expand_as(place).flatten(-2))
    return row_start, index[..., :-1].contiguous()


def route_rows_on_triton(chosen, chunks: int, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_rows` in two passes over the bits, count and place; nothing is sorted."""
    b, h, _, s = chosen.shape
    segments = triton.cdiv(s, SEGMENT)
    row_index = torch.empty(b, h, s * choices, dtype=torch.int32, device=chosen.device)
    count = torch.empty(b, h, chunks * segments, dtype=torch.int32, device=chosen.device)
    sizes = {"tokens": s, "chunks": chunks, "segments": segments, "SEGMENT": SEGMENT, "num_warps": 8}
    count_rows_kernel[(segments, b * h)](chosen, count, **sizes)
    before = torch.nn.functional.pad(count.cumsum(-1, dtype=torch.int32), (1, 0))
    row_start = before[..., ::segments].contiguous()
    before = before[..., :-1].contiguous()
    place_rows_kernel[(segments, b * h)](chosen, before, row_index, entries=s * choices, **sizes)
    return row_start, row_index
