"""XAttention: blocks chosen by the softmax of antidiagonal sums, until they hold a share of the probability.

Keys pass round the ring twice before the attention: once for the softmax of every query cell, once for the
probability of every block. A query block always attends the first block and its own.

Reference: XAttention (arXiv 2503.16428).

Legend: N tokens, M blocks, m local query blocks, n visiting key blocks, b batch, h query heads, g key heads.
"""

from dataclasses import dataclass

import torch

from ..kernels.antidiagonal import block_scores, cell_mass, cells_of
from ..kernels.select import select
from ..kernels.tile_lists import list_by_key, list_by_query
from ..kernels.tiles import Tiles
from ..ring import all_gather, visit
from .sparse_index import SparseIndex


@dataclass(frozen=True)
class BlockIndex(SparseIndex):
    """attended(t, u) = u <= t and chosen[t // G, u // G], per batch entry and query head.

    With documents, also t and u of one; a query block's choice is that of the document of its first row.

    chosen  bool [b, h, m, M]: local query blocks, all key blocks by global id; groups, the key heads

    First and own block always, block 2 chosen once, M = 4:

        #
        ##
        # #
        # ##
    """

    chosen: torch.Tensor
    groups: int

    def tiles(self, source: int, *, by_key: bool = False) -> Tiles:
        mask = self.chosen.index_select(-1, self.layout.blocks(source, self.chosen.device))
        count, index = list_by_query(mask)
        key_count, key_index = list_by_key(mask, self.groups) if by_key else (None, None)
        return Tiles(
            count,
            index,
            source == self.rank,
            self.layout.block_size,
            first_key=self.first_key(source, self.chosen.device),
            key_count=key_count,
            key_index=key_index,
        )

    def complete(self, rings) -> "BlockIndex":
        everywhere = torch.empty_like(self.chosen).repeat(1, 1, self.layout.world_size, 1)
        for rank, chosen in enumerate(all_gather(self.chosen.byte(), rings)):
            everywhere[:, :, self.layout.blocks(rank, chosen.device)] = chosen.bool()
        return _Complete(**self.__dict__, everywhere=everywhere)

    def dense_mask(self) -> torch.Tensor:
        raise ValueError("the mask needs every rank's choice; ask for the index with return_index=True")


@dataclass(frozen=True)
class _Complete(BlockIndex):
    """A BlockIndex that knows the choice of every rank's rows: bool [b, h, M, M], in global order."""

    everywhere: torch.Tensor

    def dense_mask(self) -> torch.Tensor:
        size = self.layout.block_size
        tokens = self.everywhere.repeat_interleave(size, -1).repeat_interleave(size, -2)
        return tokens & self.allowed(tokens.device)


def build(config, query, key, layout, rings, *, rank: int, scale: float, documents=None, **_) -> BlockIndex:
    """Scores all blocks, then keeps each query block's highest until their share reaches the threshold."""
    method, device = config.method, query.device
    query_blocks = layout.blocks(rank, device)
    settings = {"stride": method.stride, "scale": scale / (method.stride * method.norm)}
    key = key.contiguous()

    def step(source: int) -> tuple[torch.Tensor, dict]:
        first_cell = _first_cell(documents, layout, rank, source, method.stride, device)
        return layout.blocks(source, device), {**settings, "first_cell": first_cell}

    lse = None
    for source, (visiting,) in visit((key,), rings):
        key_blocks, known = step(source)
        part = cell_mass(query, visiting, query_blocks, key_blocks, **known)
        lse = part if lse is None else torch.logaddexp(lse, part)
    first_block = None
    if documents is not None:
        first_block = documents.first_block(layout, rank, device)
        lse = lse.masked_fill(~_of_block(documents, layout, rank, method.stride, device), torch.inf)
    b, h, m = query.shape[1], query.shape[2], len(query_blocks)
    scores = torch.zeros(b, h, m, layout.num_blocks, dtype=lse.dtype, device=device)
    for source, (visiting,) in visit((key,), rings):
        key_blocks, known = step(source)
        scores[..., key_blocks] = block_scores(query, visiting, query_blocks, key_blocks, lse, **known)
    chosen = choose(scores, query_blocks, method, first_block)
    return BlockIndex(layout, rank, chosen, key.shape[2], documents=documents)


def choose(scores, query_blocks, method, first_block=None) -> torch.Tensor:
    """The attended key blocks of every query block: bool [b, h, m, M].

    First and own block (and the one before, with keep_recent), then by descending score, ties to the earlier
    block, while what is kept holds less than threshold x total: the block that crosses it is kept. The first
    block is block 0, or first_block int64 [b, m], where the document of the query block begins.
    """
    ids = torch.arange(scores.shape[-1], device=scores.device)
    distance = query_blocks[:, None] - ids
    first = 0 if first_block is None else first_block[:, None, :, None]
    possible = (distance >= 0) & (ids >= first)
    always = possible & ((distance == 0) | (ids == first) | (method.keep_recent & (distance == 1)))
    certain = torch.where(always, scores, 0).sum(-1, dtype=torch.float64)
    wanted = method.threshold * scores.sum(-1, dtype=torch.float64) - certain
    # Chosen blocks and impossible ones compete with score 0: the mask below has the last word on them.
    free = torch.where(always, 0, scores).flatten(0, -2)
    cap = torch.full((len(free),), scores.shape[-1], dtype=torch.int32, device=scores.device)
    kept = select(free, wanted.flatten(), cap).view(scores.shape)
    return (kept | always) & possible


def _first_cell(documents, layout, rank: int, source: int, stride: int, device) -> torch.Tensor | None:
    """Cells of `source` before the document of each cell of `rank`: int32 [b, i]; None without documents.

    A cell is of the document of its last token.
    """
    if documents is None:
        return None

    def make():
        own, theirs = (_cells(layout, holder, stride, device) for holder in (rank, source))
        first = documents.begins(own * stride + stride - 1) // stride
        return torch.searchsorted(theirs, first, out_int32=True)

    return documents.kept(("first_cell", layout, rank, source, stride, device), make)


def _of_block(documents, layout, rank: int, stride: int, device) -> torch.Tensor:
    """Whether a cell is of the document of its block's first token: bool [b, 1, i]."""

    def make():
        last = _cells(layout, rank, stride, device) * stride + stride - 1
        of_block = last // layout.block_size * layout.block_size
        return (documents.begins(last) == documents.begins(of_block))[:, None]

    return documents.kept(("of_block", layout, rank, stride, device), make)


def _cells(layout, rank: int, stride: int, device) -> torch.Tensor:
    """Global ids of the cells of `rank`, ascending: int64 [i]."""
    return cells_of(layout.blocks(rank, device), layout.local_tokens // stride)


if __name__ == "__main__":
    from .draw import main

    main("xattn")
