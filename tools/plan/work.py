"""How many (query, key) pairs each rank attends in each ring step, from synthetic masks of a real shape.

A mask is drawn once for the whole sequence, block by block, and dealt to ranks afterwards: the same mask is
counted on every layout and any number of ranks. `index_of` makes the package's own index from it, for the
kernels to run and for tests to count again.

    dense   everything
    minfer  per head a sink, columns and slashes by fixed budgets: half of the slashes near (log-uniform),
            half anywhere; columns anywhere, every head its own
    moba    every query block chooses topk - 1 earlier chunks by a gate of chunk popularity and noise; all
            tokens of a block choose alike, which balances worse than choosing one by one
    xattn   block scores of popular key blocks, a local decay and noise, through the package's own choice

Legend: N tokens, G block size, M = N / G blocks, h query heads, W ranks.
"""

from dataclasses import dataclass

import torch

from megatron_mtrain.config import XattnConfig
from megatron_mtrain.index.dense import DenseIndex
from megatron_mtrain.index.minfer import VerticalSlashIndex
from megatron_mtrain.index.moba import ChunkIndex
from megatron_mtrain.index.xattn import BlockIndex, choose
from megatron_mtrain.kernels.route import route_rows
from megatron_mtrain.layouts import Layout

METHODS = ("dense", "minfer", "moba", "xattn")
BLOCK = 128


@dataclass(frozen=True)
class Budget:
    """What the sparse methods may attend.

    columns a head and slash_share, slashes a block distance (minfer); chunk, tokens, and topk (moba);
    threshold, the share of the probability that is kept (xattn).
    """

    columns: int = 1024
    slash_share: float = 0.025
    chunk: int = 4096
    topk: int = 12
    threshold: float = 0.9


@dataclass(frozen=True)
class Mask:
    """A drawn mask of `heads` query heads over num_tokens tokens, in blocks of `block` tokens.

    slashes bool [h, M] and columns bool [h, N] (minfer), chunks bool [h, M, chunks] (moba), blocks bool
    [h, M, M] (xattn); the others are None.
    """

    method: str
    num_tokens: int
    heads: int
    block: int
    budget: Budget
    slashes: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    chunks: torch.Tensor | None = None
    blocks: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.block


def draw(method: str, num_tokens: int, heads: int, *, budget=None, block: int = BLOCK, seed: int = 0) -> Mask:
    """A mask of `method`. Raises ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    generator = torch.Generator().manual_seed(seed)
    mask = Mask(method, num_tokens, heads, block, budget or Budget())
    drawn = {"dense": lambda *_: {}, "minfer": _minfer, "moba": _moba, "xattn": _xattn}[method]
    return Mask(**{**mask.__dict__, **drawn(mask, generator)})


def _minfer(mask: Mask, generator) -> dict:
    m, sink = mask.num_blocks, min(30, mask.budget.columns)
    slashes = torch.zeros(mask.heads, m, dtype=torch.bool)
    columns = torch.zeros(mask.heads, mask.num_tokens, dtype=torch.bool)
    wanted = max(2, round(m * mask.budget.slash_share))
    for head in range(mask.heads):
        slashes[head, :2] = True
        while int(slashes[head].sum()) < wanted:
            near, far = torch.rand(2, generator=generator).tolist()
            slashes[head, min(m - 1, int(m**near))] = True
            slashes[head, int(m * far)] = True
        columns[head, :sink] = True
        anywhere = torch.randperm(mask.num_tokens - sink, generator=generator) + sink
        columns[head, anywhere[: mask.budget.columns - sink]] = True
    return {"slashes": slashes, "columns": columns}


def _moba(mask: Mask, generator) -> dict:
    per_chunk = mask.budget.chunk // mask.block
    count = -(-mask.num_blocks // per_chunk)
    popular = torch.randn(mask.heads, 1, count, generator=generator)
    gate = popular + torch.randn(mask.heads, mask.num_blocks, count, generator=generator)
    own = torch.arange(mask.num_blocks) // per_chunk
    gate.masked_fill_(torch.arange(count) >= own[:, None], -torch.inf)
    best = gate.topk(min(mask.budget.topk - 1, count), -1)
    chosen = torch.zeros_like(gate, dtype=torch.bool).scatter_(-1, best.indices, best.values > -torch.inf)
    return {"chunks": chosen}


def _xattn(mask: Mask, generator) -> dict:
    m = mask.num_blocks
    rows = torch.arange(m)
    distance = (rows[:, None] - rows).float()
    method = XattnConfig(granularity=mask.block, threshold=mask.budget.threshold)
    blocks = torch.empty(mask.heads, m, m, dtype=torch.bool)
    for head in range(mask.heads):
        popular = torch.randn(m, generator=generator) * 2.5
        scores = (popular + torch.randn(m, m, generator=generator) * 0.7).exp_()
        scores += scores.mean() * m / 4 * torch.exp(-distance.clamp(min=0) / 8)
        scores.masked_fill_(distance < 0, 0)
        blocks[head] = choose(scores[None, None], rows, method)[0, 0]
    return {"blocks": blocks}


def block_pairs(mask: Mask) -> torch.Tensor:
    """Attended pairs of every (query block, key block), summed over heads: float64 [M, M], whole numbers."""
    m, size = mask.num_blocks, mask.block
    rows = torch.arange(m)
    distance = rows[:, None] - rows
    total = torch.zeros(m, m, dtype=torch.float64)
    whole = torch.tensor(float(size * size))
    for head in range(mask.heads):
        if mask.method == "minfer":
            seen = mask.columns[head].view(m, size).sum(-1).float() * size
            total += torch.where(mask.slashes[head][distance.clamp(min=0)], whole, seen)
        elif mask.method == "moba":
            chunk = rows // (mask.budget.chunk // size)
            total += (mask.chunks[head][:, chunk] | (chunk[:, None] == chunk)) * whole
        elif mask.method == "xattn":
            total += mask.blocks[head] * whole
        else:
            total += whole
    total[distance < 0] = 0
    total.diagonal().fill_(mask.heads * size * (size + 1) / 2)  # every method attends its own block
    return total


def rank_pairs(pairs: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Pairs that rank r attends in the shard of rank s: float64 [W, W], from block_pairs."""
    member = torch.zeros(layout.world_size, layout.num_blocks, dtype=torch.float64)
    for rank in range(layout.world_size):
        member[rank, layout.blocks(rank)] = 1
    return member @ pairs @ member.T


def index_of(mask: Mask, layout: Layout, rank: int, *, groups: int, device="cpu"):
    """The package's own index of `mask` for the queries of `rank`, batch 1, `groups` key heads."""
    rows = layout.blocks(rank)
    if mask.method == "dense":
        return DenseIndex(layout, rank, 1, mask.heads, groups, torch.device(device))
    if mask.method == "minfer":
        parts = mask.slashes[None].to(device), mask.columns[None].to(device)
        return VerticalSlashIndex(layout, rank, *parts, groups, mask.budget.columns)
    if mask.method == "xattn":
        return BlockIndex(layout, rank, mask.blocks[None][:, :, rows].to(device), groups)
    chosen = mask.chunks[:, rows].repeat_interleave(mask.block, 1)  # [h, s, chunks]
    count = chosen.shape[-1]
    words = torch.nn.functional.pad(chosen, (0, -count % 32)).unflatten(-1, (-1, 32)).long()
    packed = (words << torch.arange(32)).sum(-1)
    bits = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    bits = bits.transpose(1, 2)[None].contiguous().to(device)
    routes = route_rows(bits, count, mask.budget.topk - 1)
    return ChunkIndex(layout, rank, bits, *routes, mask.budget.chunk, groups)
