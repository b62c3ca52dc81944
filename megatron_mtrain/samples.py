"""What one attention layer tells of a sampled micro batch: tensors on the device, which telemetry.py gathers.

Recall is the share of the probability of the sequence's last PROBES queries that lies on what they attend:
exp(lse of what is attended - lse of everything), for every method alike. It is exact for these rows and an
estimate for the others. Of packed sequences the last document counts.

Nothing here waits for the device, and nothing of it runs in a step that is not sampled.

Legend: s tokens of this rank, b batch, h query heads of this rank, g key heads, d head size, q probe rows, W
context-parallel ranks.
"""

from dataclasses import dataclass

import torch

from .clock import Moment
from .index.dense import DenseIndex
from .index.minfer import gather_probe, probe_rows
from .index.sparse_index import SparseIndex
from .kernels.pairs import attended_pairs
from .kernels.probe_scores import log_mass
from .ring import Rings, all_gather, sources

PROBES = 64
BY_HEAD = ("density", "recall", "columns", "slashes")


@dataclass(frozen=True)
class Sample:
    """One micro batch in one layer, on one rank.

    by_head  float64 [4, h], see BY_HEAD: parts of the mean over the batch, to be summed over context-parallel
             ranks; NaN where a method has no such thing
    work     float64 [W], attended pairs of every step of the ring, in this rank's order
    index    the moments when the index was begun and when it was built
    """

    by_head: torch.Tensor
    work: torch.Tensor
    index: tuple[Moment, Moment]


@torch.no_grad()
def sample(index: SparseIndex, built: tuple[Moment, Moment], query, key, lse, *, rings: Rings, scale: float):
    """The Sample of one micro batch; all ranks of the rings call it together.

    query [s, b, h, d] and key [s, b, g, d] are this rank's shards, lse [b, h, s] that of its attention.
    """
    tokens, size = index.layout.num_tokens, index.layout.world_size
    pairs = torch.stack([attended_pairs(index.tiles(source)) for source in sources(rings)]).double()
    values = {"density": pairs.sum(0).mean(0) / (tokens * (tokens + 1) / 2)}
    if not isinstance(index, DenseIndex):  # of which it is 1
        values["recall"] = probe_recall(index, query, key, lse, rings=rings, scale=scale)
    values |= {name: count.double().mean(0) / size for name, count in index.statistics().items()}
    absent = torch.full_like(values["density"], torch.nan)
    by_head = torch.stack([values.get(name, absent) for name in BY_HEAD])
    return Sample(by_head, pairs.sum((1, 2)), built)


def probe_recall(index: SparseIndex, query, key, lse, *, rings: Rings, scale: float) -> torch.Tensor:
    """This rank's part of the recall of every head: [h]; the sum over ranks is the mean over batch and probe
    rows.
    """
    layout, rank, documents = index.layout, index.rank, index.documents
    tokens, size = layout.num_tokens, layout.block_size
    probes = min(PROBES, tokens)
    begins = [0] * query.shape[1] if documents is None else [starts[-1] for starts in documents.starts]
    probe = gather_probe(query, layout, rings, rank, probes)
    where = layout.blocks(rank, query.device) * size, tokens - probes
    begin = None
    if documents is not None:  # the last one of every batch entry
        begin = documents.begins(torch.full((1,), tokens - 1, device=query.device))[:, 0]
        where = where[0].expand(len(begin), -1).contiguous(), torch.full_like(begin, where[1])
    mass = log_mass(probe, key, *where, scale, size, begin)
    whole = torch.logsumexp(all_gather(mass, rings), 0)
    rows, places = probe_rows(layout, rank, probes, query.device)
    kept = torch.exp(lse[..., rows] - whole[..., places]).clamp(max=1)  # rounding alone goes beyond
    inside = [min(probes, tokens - begin) for begin in begins]  # probe rows of the last document
    parts = [
        torch.where(places >= probes - count, share, 0).sum(-1) / count
        for share, count in zip(kept, inside, strict=True)
    ]
    return torch.stack(parts).double().mean(0)
