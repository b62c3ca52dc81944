"""What a method decided to attend, in the form that the ring asks for: tiles per visiting shard."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from ..documents import Documents
from ..kernels.tiles import Tiles
from ..layouts import Layout


@dataclass(frozen=True)
class SparseIndex(ABC):
    """The attended pairs of one layer's batch, as rank `rank` of `layout` needs them.

    documents  None: every sequence is one document
    """

    layout: Layout
    rank: int
    documents: Documents | None = field(default=None, kw_only=True)

    @abstractmethod
    def tiles(self, source: int, *, by_key: bool = False) -> Tiles:
        """What this rank's queries attend in the shard of `source`; `by_key` adds the lists that dK and dV
        need.

        No tensor of it is copied to the host.
        """

    @abstractmethod
    def dense_mask(self) -> torch.Tensor:
        """Every attended pair as bool [b, h, N, N], (query, key) in global positions: for tests and
        drawings."""

    def statistics(self) -> dict[str, torch.Tensor]:
        """Numbers that describe the choice of every head: [b, h] by name, the same on all ranks."""
        return {}

    def complete(self, rings) -> "SparseIndex":
        """The same index with all that dense_mask needs, gathered from the other ranks; all of them call
        it."""
        return self

    def first_key(self, source: int, device) -> torch.Tensor | None:
        """Tiles.first_key for the shard of `source`."""
        if self.documents is None:
            return None
        return self.documents.first_key(self.layout, self.rank, source, device)

    def allowed(self, device) -> torch.Tensor:
        """The pairs that any method may attend: u <= t, in one document. bool [N, N] or [b, 1, N, N]."""
        num_tokens = self.layout.num_tokens
        causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
        return causal if self.documents is None else causal & self.documents.same(device)
