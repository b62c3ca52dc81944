"""Where the documents of packed sequences begin: what inter-document masking is made of.

A token attends only tokens of its own document; docs/explanation/documents.md says what that means for every
attention method. The borders are known on the host, once per micro batch; what the layers need of them on a
device is made there once and kept, so no layer waits for the device.

Two documents, the second from token 6 on, in blocks of G = 4 tokens:

    token         0 1 2 3   4 5 6 7   8 9 10 11
    document      a a a a   a a b b   b b b  b
    begins        0 0 0 0   0 0 6 6   6 6 6  6
    first_block   0         0         1           where the document of the block's first token begins

Legend: N tokens of the whole sequence, b batch, s local tokens, m local blocks, G block size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .layouts import Layout


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a batch of packed sequences.

    num_tokens  N; starts, the first token of every document, ascending from 0, for each batch entry
    """

    num_tokens: int
    starts: tuple[tuple[int, ...], ...]
    made: dict = field(default_factory=dict, repr=False)  # device tensors, by what they are

    @classmethod
    def of(
        cls, cu_seqlens: "Documents | torch.Tensor | Sequence", num_tokens: int, batch: int
    ) -> "Documents":
        """The documents that cumulative lengths describe: for each of `batch` sequences 0, ..., `num_tokens`.

        cu_seqlens is a tensor [batch, any], or a list with one list or tensor per sequence; the end may be
        repeated, as Megatron's data sets fill rows up with it. A tensor on a device is waited for. Documents
        pass through. Raises ValueError for anything that does not describe `batch` sequences of `num_tokens`
        tokens.
        """
        if isinstance(cu_seqlens, Documents):
            if (cu_seqlens.num_tokens, len(cu_seqlens.starts)) != (num_tokens, batch):
                raise ValueError(
                    f"the documents are those of {len(cu_seqlens.starts)} sequences of "
                    f"{cu_seqlens.num_tokens} tokens; the batch has {batch} of {num_tokens}"
                )
            return cu_seqlens
        if len(cu_seqlens) != batch:
            raise ValueError(
                f"cu_seqlens has {len(cu_seqlens)} rows, the batch {batch} sequences; give one row of "
                "document borders per sequence"
            )
        return cls(num_tokens, tuple(_starts(row, num_tokens, at) for at, row in enumerate(cu_seqlens)))

    @property
    def several(self) -> bool:
        """Whether any sequence has more than one document."""
        return any(len(row) > 1 for row in self.starts)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(int(np.diff([*row, self.num_tokens]).max()) for row in self.starts)

    def numbers(self, positions: torch.Tensor) -> torch.Tensor:
        """Which document of its sequence, from 0, the tokens at `positions` [p] are of: int64 [b, p]."""
        table = self._table(positions.device)
        return torch.searchsorted(table, positions.expand(len(table), -1).contiguous(), right=True) - 1

    def begins(self, positions: torch.Tensor) -> torch.Tensor:
        """Where the documents of the tokens at int64 `positions` [p] begin: int64 [b, p]."""
        return self._table(positions.device).gather(1, self.numbers(positions))

    def first_key(self, layout: Layout, rank: int, source: int, device) -> torch.Tensor:
        """Keys of `source` that lie before the document of each row of `rank`: int32 [b, s], see Tiles."""

        def make():
            begins = self.begins(layout.positions(rank, device))
            return torch.searchsorted(layout.positions(source, device), begins, out_int32=True)

        return self.kept(("first_key", layout, rank, source, device), make)

    def first_block(self, layout: Layout, rank: int, device) -> torch.Tensor:
        """The block in which the document of the first row of each block of `rank` begins: int64 [b, m].

        A query block needs no earlier key block: rows of documents that begin inside it need none at all.
        """

        def make():
            return self.begins(layout.blocks(rank, device) * layout.block_size) // layout.block_size

        return self.kept(("first_block", layout, rank, device), make)

    def reach(self, layout: Layout, rank: int, source: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        """How far the local blocks of `rank` and of `source` reach each other within a document.

        Query block i needs no key block before first[b, i]; key block j is needed by no query block from
        after[b, j] on. int64 [b, m] both; causality aside.
        """

        def make():
            first_block = self.first_block(layout, rank, device)
            keys = layout.blocks(source, device)
            after = torch.searchsorted(
                first_block, keys.expand(len(first_block), -1).contiguous(), right=True
            )
            return torch.searchsorted(keys, first_block), after

        return self.kept(("reach", layout, rank, source, device), make)

    def same(self, device) -> torch.Tensor:
        """Whether two tokens are of one document: bool [b, 1, N, N], for tests and drawings."""
        begins = self.begins(torch.arange(self.num_tokens, device=device))
        return (begins[:, :, None] == begins[:, None])[:, None]

    def kept(self, name: tuple, make: Callable):
        """What `make` returned for `name`, the first time it was asked for: for all that the layers share."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def _table(self, device: torch.device) -> torch.Tensor:
        """The starts as int64 [b, most documents of a sequence], filled up with N."""

        def make():
            most = max(len(row) for row in self.starts)
            table = torch.tensor([[*row, *[self.num_tokens] * (most - len(row))] for row in self.starts])
            # From pageable memory the copy would wait for the device.
            return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table

        return self.kept(("table", device), make)


def _starts(row, num_tokens: int, at: int) -> tuple[int, ...]:
    """The first tokens of one sequence's documents, from its cumulative lengths; empty ones do not count."""
    borders = row.detach().cpu().numpy() if isinstance(row, torch.Tensor) else np.asarray(row)
    where = f"cu_seqlens of sequence {at}"
    if borders.ndim != 1 or len(borders) < 2 or borders.dtype.kind not in "iu":
        raise ValueError(
            f"{where} has shape {list(borders.shape)} and dtype {borders.dtype}; it must be a row of "
            "integers, from 0 over every document's end to the number of tokens"
        )
    if borders[0] != 0 or borders[-1] != num_tokens:
        raise ValueError(
            f"{where} goes from {borders[0]} to {borders[-1]}; it must go from 0 to the {num_tokens} tokens "
            "of the sequence"
        )
    lengths = np.diff(borders.astype(np.int64))
    if lengths.min() < 0:
        place = int(lengths.argmin())
        raise ValueError(
            f"{where} descends from {borders[place]} to {borders[place + 1]}; documents follow one another: "
            "give their borders in ascending order"
        )
    return tuple(borders[:-1][lengths > 0].tolist())
