"""Scores of blocks from sums along antidiagonals (XAttention), exact in the sense that every key is looked at.

Cells are `stride` tokens. The score of cells i, j is the sum of q[iS + S - 1 - x] . k[jS + x] over x: one product of
matrices of inner size S * d. Two passes over the visiting keys: `cell_mass` for the softmax of every query cell, which
the ring steps combine; then `block_scores` sums probabilities by key block.

Legend: S stride, G block size, s query rows, t key tokens, i = s / S query cells, m, n query, key blocks, b batch,
h query heads, g key heads, d head size.
"""

import torch


def cell_mass(query, key, query_blocks, key_blocks, *, stride: int, scale: float) -> torch.Tensor:
    """log(sum(exp(scores))) of every query cell over the visiting keys: [b, h, i], -inf where all are later.

    query [s, b, h, d], key [t, b, g, d]; query_blocks int64 [m] and key_blocks int64 [n] are global block ids; `scale`
    multiplies the antidiagonal sums. float32 (float64 for float64 inputs).
    """
    return torch.logsumexp(_cell_scores(query, key, query_blocks, key_blocks, stride, scale), -1)


def block_scores(query, key, query_blocks, key_blocks, lse, *, stride: int, scale: float) -> torch.Tensor:
    """Probability of every (query block, key block) pair, summed over its cells: [b, h, m, n].

    lse [b, h, i] is over the keys of all ranks.
    """
    probability = torch.exp(_cell_scores(query, key, query_blocks, key_blocks, stride, scale) - lse[..., None])
    m, n = len(query_blocks), len(key_blocks)
    return probability.unflatten(-1, (n, -1)).unflatten(-3, (m, -1)).sum((-1, -3))


def _cell_scores(query, key, query_blocks, key_blocks, stride: int, scale: float) -> torch.Tensor:
    """Scaled scores of cells [b, h, i, j], -inf where the key cell is later than the query cell."""
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    groups = key.shape[2]
    q = query.to(wide).unflatten(0, (-1, stride)).flip(1).permute(2, 3, 0, 1, 4).flatten(3)
    k = key.to(wide).unflatten(0, (-1, stride)).permute(2, 3, 0, 1, 4).flatten(3)
    scores = (q.unflatten(1, (groups, -1)).flatten(2, 3) @ k.mT).mul_(scale)
    scores = scores.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
    later = _cells(key_blocks, k.shape[2]) > _cells(query_blocks, q.shape[2])[:, None]
    return scores.masked_fill_(later, -torch.inf)


def _cells(blocks, count: int) -> torch.Tensor:
    """Global ids of the cells of `blocks`, `count` in all."""
    per_block = count // len(blocks)
    return (blocks[:, None] * per_block + torch.arange(per_block, device=blocks.device)).flatten()
