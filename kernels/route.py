"""Which chunk of keys a query row goes to (MoBA): gate, choice, and the rows of every chunk.

Legend: b batch, h query heads, g key heads, d head size, s query rows, t key tokens, c chunks, k choices of a row,
m query blocks, w = ceil(c / 32) words.
"""

import torch

from .reference import pack_bits, unpack_bits

ROWS = 4096  # query rows gated at a time: 16 heads and 256 chunks then take 64 MB


def chunk_sums(key, chunk_of_block, chunks: int, block_size: int) -> torch.Tensor:
    """Sum of the keys of every chunk: float32 [c, b, g, d] (float64 for float64 keys).

    key [t, b, g, d]; chunk_of_block int64 [t / block_size], ascending, is the chunk of every local block.
    """
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    per_block = key.unflatten(0, (-1, block_size)).sum(1, dtype=wide)
    running = torch.nn.functional.pad(per_block.cumsum(0, dtype=torch.float64), (0, 0, 0, 0, 0, 0, 1, 0))
    borders = torch.searchsorted(chunk_of_block, torch.arange(chunks + 1, device=key.device))
    return (running[borders[1:]] - running[borders[:-1]]).to(wide)


def choose_chunks(query, means, chunk_of_block, choices: int, block_size: int) -> torch.Tensor:
    """The `choices` highest gates of every row among the chunks before its own, as bits: int32 [b, h, w, s].

    query [s, b, h, d], means [c, b, g, d], chunk_of_block int64 [m] of the query blocks. gate = q . mean in float32
    (float64 for float64 queries); ties go to the lower chunk; a row with fewer chunks before its own takes all.
    """
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
        order = torch.sort(gate.masked_fill_(~past, -torch.inf), dim=-1, descending=True, stable=True).indices
        taken = torch.zeros(*gate.shape[:-1], words * 32, dtype=torch.bool, device=query.device)
        taken.scatter_(-1, order[..., :choices], True)
        taken[..., :chunks] &= past
        chosen[..., rows] = pack_bits(taken).transpose(-1, -2)
    return chosen


def route_rows(chosen, chunks: int, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of every chunk: (row_start int32 [b, h, c + 1], row_index int32 [b, h, s * choices]), see Routes."""
    b, h, _, s = chosen.shape
    taken = unpack_bits(chosen.transpose(-1, -2))[..., :chunks].transpose(-1, -2)
    count = taken.sum(-1, dtype=torch.int32)
    row_start = torch.nn.functional.pad(count.cumsum(-1, dtype=torch.int32), (1, 0))
    index = torch.zeros(b, h, s * choices + 1, dtype=torch.int32, device=chosen.device)
    place = torch.where(taken, row_start[..., :-1, None] + taken.cumsum(-1) - 1, s * choices)
    rows = torch.arange(s, dtype=torch.int32, device=chosen.device)
    index.scatter_(-1, place.flatten(-2), rows.expand_as(place).flatten(-2))
    return row_start, index[..., :-1].contiguous()
