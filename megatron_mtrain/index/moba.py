"""Mixture of block attention: every query token chooses a few whole chunks of earlier keys, and sees its own
chunk.

A token's gate of a chunk is its dot product with the mean of the chunk's keys. Chunks that end before the
token's own begins compete; the highest topk - 1 are attended, whole. Only the means travel, never gathered
keys.

Reference: MoBA (arXiv 2502.13189).

Legend: N tokens, s of them local, C tokens of a chunk, c chunks, b batch, h query heads, g key heads, d head
size, m query blocks, n key blocks.
"""

from dataclasses import dataclass

import torch

from ..kernels.route import choose_chunks, chunk_sums, route_rows
from ..kernels.tile_lists import list_key_ranges, list_ranges
from ..kernels.tiles import Routes, Tiles
from ..ring import all_gather, all_reduce
from .sparse_index import SparseIndex


@dataclass(frozen=True)
class ChunkIndex(SparseIndex):
    """attended(t, u) = u <= t and (t // C == u // C or chosen[t, u // C]), per batch entry and query head.

    With documents, also t and u of one; a row's choice begins with the chunk in which its document begins.

    chosen       bits of the chunks that each local row attends beside its own: int32 [b, h, words, s]
    row_start    int32 [b, h, c + 1] and row_index int32 [b, h, s * (topk - 1)]: the same by chunk, see Routes
    chunk_size   C; groups, the key heads

    Chunks of two blocks, topk 1 + 1, M = 8, seen by block (own chunk #, a chosen one o, by some rows):

        #
        ##
        oo#
        oo##
        oooo#
        oooo##
        oooooo#
        oooooo##
    """

    chosen: torch.Tensor
    row_start: torch.Tensor
    row_index: torch.Tensor
    chunk_size: int
    groups: int

    def tiles(self, source: int, *, by_key: bool = False) -> Tiles:
        device, size = self.chosen.device, self.layout.block_size
        per_chunk = self.chunk_size // size
        query, key = (self.layout.blocks(rank, device) for rank in (self.rank, source))
        # Blocks ascend and a chunk's blocks are dealt evenly, so its local blocks are a range, and few.
        slots = min(per_chunk, len(key))
        b, h, chunks = *self.row_start.shape[:2], self.row_start.shape[2] - 1
        first = torch.searchsorted(key, query // per_chunk * per_chunk)
        after = torch.searchsorted(key, query, right=True)
        if self.documents is not None:
            reach = self.documents.reach(self.layout, self.rank, source, device)
            first = torch.maximum(first, reach[0])
        count, index = list_ranges(first, after - first, slots, batch=b, heads=h)
        key_count = key_index = None
        if by_key:
            first = torch.searchsorted(query, key)
            after = torch.searchsorted(query, (key // per_chunk + 1) * per_chunk)
            if self.documents is not None:
                after = torch.minimum(after, reach[1])
            shape = {"batch": b, "heads": h, "groups": self.groups, "num_blocks": len(query)}
            key_count, key_index = list_key_ranges(first, after - first, slots, **shape)
        # Blocks ascend, so a chunk's keys stand together in every shard.
        borders = torch.arange(chunks + 1, device=device) * per_chunk
        key_start = (torch.searchsorted(key, borders) * size).int()
        routes = Routes(key_start, self.row_start, self.row_index)
        return Tiles(
            count,
            index,
            source == self.rank,
            size,
            routes=routes,
            first_key=self.first_key(source, device),
            key_count=key_count,
            key_index=key_index,
        )

    def complete(self, rings) -> "ChunkIndex":
        words = all_gather(self.chosen, rings)
        rank_order = self.layout.unshard(list(words), -1)
        return _Complete(**self.__dict__, everywhere=rank_order)

    def dense_mask(self) -> torch.Tensor:
        raise ValueError("the mask needs every rank's choice; ask for the index with return_index=True")


@dataclass(frozen=True)
class _Complete(ChunkIndex):
    """A ChunkIndex that knows the choice of every rank's rows: int32 [b, h, words, N], in global order."""

    everywhere: torch.Tensor

    def dense_mask(self) -> torch.Tensor:
        num_tokens = self.layout.num_tokens
        chunk = torch.arange(num_tokens, device=self.everywhere.device) // self.chunk_size
        word, bit = chunk // 32, chunk % 32
        chosen = (self.everywhere.index_select(2, word).transpose(-1, -2) >> bit) & 1
        return (chosen.bool() | (chunk[:, None] == chunk)) & self.allowed(chunk.device)


@dataclass(frozen=True)
class _ChunkDocuments:
    """What documents are for chunks, tensors that all layers share.

    counts      bool [s, b, 1, 1]: keys of the document of their chunk's last token, the only ones that later
                chunks can see
    tokens      int64 [c, b, 1, 1]: how many of them a chunk has
    first_chunk int32 [b, s]: the chunk in which the document of a row begins
    """

    counts: torch.Tensor
    tokens: torch.Tensor
    first_chunk: torch.Tensor

    @classmethod
    def of(cls, documents, layout, rank: int, size: int, device) -> "_ChunkDocuments":
        starts = torch.arange(0, layout.num_tokens, size, device=device)
        last = (starts + size - 1).clamp(max=layout.num_tokens - 1)
        begins = documents.begins(last)
        positions = layout.positions(rank, device)
        counts = positions >= begins[:, positions // size]
        tokens = last + 1 - torch.maximum(starts, begins)
        first_chunk = (documents.begins(positions) // size).int()
        return cls(counts.T[..., None, None], tokens.T[..., None, None], first_chunk)


def build(config, query, key, layout, rings, *, rank: int, documents=None, **_) -> ChunkIndex:
    """Means of the chunks' keys over all ranks, then the choice of every local row."""
    size, per_chunk = config.method.moba_chunk_size, config.method.moba_chunk_size // layout.block_size
    chunks = -(-layout.num_tokens // size)
    chunk_of_block = layout.blocks(rank, query.device) // per_chunk
    tokens, first_chunk = size, None  # a short last chunk is nobody's past: its mean is never used
    if documents is not None:
        made = documents.kept(
            ("chunks", layout, rank, size, key.device),
            lambda: _ChunkDocuments.of(documents, layout, rank, size, key.device),
        )
        tokens, first_chunk = made.tokens, made.first_chunk
        key = torch.where(made.counts, key, 0)
    sums = all_reduce(chunk_sums(key, chunk_of_block, chunks, layout.block_size), rings)
    means = sums / tokens
    topk = min(config.method.moba_topk, chunks)
    chosen = choose_chunks(query, means, chunk_of_block, topk - 1, layout.block_size, first_chunk)
    row_start, row_index = route_rows(chosen, chunks, topk - 1)
    groups = key.shape[2]
    return ChunkIndex(layout, rank, chosen, row_start, row_index, size, groups, documents=documents)


if __name__ == "__main__":
    from .draw import main

    main("moba")
