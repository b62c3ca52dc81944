"""Where each token lives: the rank that holds it and its place there.

Two invariants, which the rest of the package leans on:
  1. shards are cut at block boundaries, so a block of `block_size` tokens is never split between ranks;
  2. the local order of a shard preserves the global order of its tokens.
With them a (query block, key block) tile is partly masked by causality only where both are the same block.

Legend: W ranks, r a rank, N tokens, G = block_size tokens, M = N / G blocks.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

LAYOUTS = ("zigzag", "stripe")


@dataclass(frozen=True)
class Layout:
    """A rule that deals M blocks to W ranks, each block to one rank and M / W blocks to every rank.

    Drawn for W = 4 and M = 8, `r: blocks(r)`:

        stripe   0: 0 4    1: 1 5    2: 2 6    3: 3 7     block b is local block b // W of rank b % W
        zigzag   0: 0 7    1: 1 6    2: 2 5    3: 3 4     rank r holds chunks r and 2W-1-r of 2W chunks
    """

    name: str
    num_tokens: int
    world_size: int
    block_size: int

    def __post_init__(self):
        if self.name not in LAYOUTS:
            raise ValueError(f"unknown layout {self.name!r}; layouts are {', '.join(LAYOUTS)}")
        for field in ("num_tokens", "world_size", "block_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)} must be at least 1")
        chunks = self.world_size * (2 if self.name == "zigzag" else 1)
        unit = chunks * self.block_size
        if self.num_tokens % unit:
            below = self.num_tokens // unit * unit
            nearest = f"{below} or {below + unit}" if below else f"{unit}"
            parts = f"context parallel size {self.world_size}" + (" * 2" if self.name == "zigzag" else "")
            raise ValueError(
                f"sequence length {self.num_tokens} is not a multiple of {parts} * block {self.block_size} = "
                f"{unit} ({self.name} layout); nearest {nearest}"
            )

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks of the whole sequence."""
        return self.num_tokens // self.block_size

    @property
    def local_tokens(self) -> int:
        """Tokens that every rank holds."""
        return self.num_tokens // self.world_size

    def blocks(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Global ids of the blocks of `rank` in local order, ascending: int64 [M / W]. Do not write to it."""
        return _blocks(self, rank, torch.device(device))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Global positions of the tokens of `rank` in local order: int64 [N / W]. Do not write to it."""
        return _positions(self, rank, torch.device(device))

    def shard(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """The part of `tensor` (N long in `dim`, global order) that `rank` holds, in local order."""
        if tensor.shape[dim] != self.num_tokens:
            raise ValueError(
                f"dimension {dim} of a tensor of shape {list(tensor.shape)} has {tensor.shape[dim]} tokens; "
                f"this layout is for {self.num_tokens}"
            )
        return tensor.index_select(dim, self.positions(rank, tensor.device))

    def unshard(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The inverse of `shard`: the tensors of ranks 0 .. W-1, joined in global order along `dim`."""
        if len(shards) != self.world_size:
            raise ValueError(f"got {len(shards)} shards; this layout has {self.world_size} ranks")
        if self.world_size == 1:
            return shards[0]
        joined = torch.cat(list(shards), dim)
        return joined.index_select(dim, _order(self, joined.device))


# Kept on the device they are used on: a copy from the host in every layer would stall it.
@lru_cache(maxsize=1024)
def _blocks(layout: Layout, rank: int, device: torch.device) -> torch.Tensor:
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is outside 0 .. {layout.world_size - 1}")
    if layout.name == "stripe":
        return torch.arange(rank, layout.num_blocks, layout.world_size, device=device)
    chunk = layout.num_blocks // (2 * layout.world_size)
    mirror = 2 * layout.world_size - 1 - rank
    first, second = (torch.arange(c * chunk, (c + 1) * chunk, device=device) for c in (rank, mirror))
    return torch.cat([first, second])


@lru_cache(maxsize=64)
def _positions(layout: Layout, rank: int, device: torch.device) -> torch.Tensor:
    starts = layout.blocks(rank, device) * layout.block_size
    return (starts[:, None] + torch.arange(layout.block_size, device=device)).flatten()


@lru_cache(maxsize=16)
def _order(layout: Layout, device: torch.device) -> torch.Tensor:
    """Where each global position is in the shards of ranks 0 .. W-1, put one behind the other: int64 [N]."""
    return torch.argsort(torch.cat([layout.positions(rank, device) for rank in range(layout.world_size)]))


@lru_cache(maxsize=256)
def make_layout(name: str, num_tokens: int, world_size: int, block_size: int) -> Layout:
    """The layout `name` ("zigzag" or "stripe") of `num_tokens` tokens over `world_size` ranks.

    Raises ValueError when the name is unknown or the tokens cannot be dealt in whole blocks: num_tokens must
    be a multiple of world_size * block_size tokens (stripe) or of twice that (zigzag).
    """
    return Layout(name, num_tokens, world_size, block_size)
