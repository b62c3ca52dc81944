"""What a method decided to attend, in the form that the ring asks for: tiles per visiting shard."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..kernels.tiles import Tiles
from ..layouts import Layout


@dataclass(frozen=True)
class SparseIndex(ABC):
    """The attended pairs of one layer's batch, as rank `rank` of `layout` needs them."""

    layout: Layout
    rank: int

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


def causal_mask(num_tokens: int, device) -> torch.Tensor:
    """u <= t as bool [N, N]."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
