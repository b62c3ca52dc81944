"""What the layers of all ranks noted in a sampled step, added up over the ranks: for telemetry.py to write.

Three reductions of small tensors and one copy to the host, once per logged step, whatever the pipeline,
tensor, context and data parallel sizes: every rank fills in what it holds and leaves the rest at zero.

Legend: l layers and h query heads of the whole model, W context-parallel ranks and so steps of a ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .clock import milliseconds
from .core_attention import SparseRingAttention
from .passes import DIRECTIONS
from .samples import BY_HEAD

METRICS = (*BY_HEAD, "index_ms")
PHASES = ("wait", "compute")


@dataclass(frozen=True)
class Totals:
    """Means over micro batches and ranks, the same on every rank; NaN where nothing was noted. On the CPU.

    by_head           float64 [5, l, h], see METRICS
    worker_imbalance  attended pairs of the busiest context-parallel rank over the mean, layer by layer
    step_imbalance    the same, step by step of the ring
    ring_ms           float64 [2, W, 2]: DIRECTIONS, steps, PHASES; mean over ranks
    slowest_ms        the same, of the slowest rank
    peak_gib          memory of the fullest GPU since the start
    """

    by_head: torch.Tensor
    worker_imbalance: float
    step_imbalance: float
    ring_ms: torch.Tensor
    slowest_ms: torch.Tensor
    peak_gib: float


def gather(
    layers: Sequence[SparseRingAttention], *, num_layers: int, num_heads: int, world_size: int, device
) -> Totals:
    """Takes the notes of this rank's layers; all ranks call it together, when the step is over."""
    ring_ms = _ring_times(layers, world_size).to(device)
    sums = [
        _by_head(layers, num_layers, num_heads, device),
        _work(layers, device),
        torch.cat([ring_ms.isfinite(), ring_ms.nan_to_num()]),
    ]
    for layer in layers:
        layer.samples.clear()
    peak = ring_ms.new_tensor([torch.cuda.max_memory_allocated() / 2**30])
    most = torch.cat([peak, ring_ms.nan_to_num().flatten()])
    flat = torch.cat([tensor.flatten() for tensor in sums])
    dist.all_reduce(flat)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    flat, most = flat.cpu(), most.cpu()
    by_head, work, times = (
        part.view(tensor.shape) for part, tensor in zip(_cut(flat, sums), sums, strict=True)
    )
    present, ring_ms = times.chunk(2)
    busiest_layer, busiest_steps, mean = work
    return Totals(
        by_head=by_head[1:] / by_head[0],
        worker_imbalance=float(busiest_layer / mean),
        step_imbalance=float(busiest_steps / mean),
        ring_ms=ring_ms / present,
        slowest_ms=most[1:].view(ring_ms.shape),
        peak_gib=float(most[0]),
    )


def _cut(flat: torch.Tensor, like: list[torch.Tensor]):
    return flat.split([tensor.numel() for tensor in like])


def _by_head(layers, num_layers: int, num_heads: int, device) -> torch.Tensor:
    """The weight of what follows, and the sum of every metric: [6, l, h], to be summed over all ranks."""
    table = torch.zeros(1 + len(METRICS), num_layers, num_heads, dtype=torch.float64, device=device)
    for layer in layers:
        if layer.samples:
            shares = torch.stack([sample.by_head for sample in layer.samples]).sum(0)
            heads = shares.shape[-1]
            first = layer.tensor_rank * heads
            place = table[:, layer.layer, first : first + heads]
            place[0] = len(layer.samples) / layer.world_size
            place[1:-1] = shares
            place[-1] = sum(milliseconds(*sample.index) for sample in layer.samples) / layer.world_size
    return table


def _work(layers, device) -> torch.Tensor:
    """Attended pairs, to be summed over all ranks: of the busiest rank of every ring, layer by layer and step
    by step, and of the mean rank. Their sums over W equal ranks cancel in a ratio."""
    work = [sample.work for layer in layers for sample in layer.samples]
    if not work:
        return torch.zeros(3, dtype=torch.float64, device=device)
    work = torch.stack(work)
    most = torch.cat([work.sum(1, keepdim=True), work], 1)
    for ring in layers[0].rings:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=ring)
    return torch.stack([most[:, 0].sum(), most[:, 1:].sum(), work.sum()])


def _ring_times(layers, world_size: int) -> torch.Tensor:
    """Mean times of this rank's passes: float64 [2, W, 2] on the CPU, NaN where there are none."""
    times = torch.full((len(DIRECTIONS), world_size, len(PHASES)), torch.nan, dtype=torch.float64)
    for direction, place in zip(DIRECTIONS, times, strict=True):
        passes = [steps for layer in layers for steps in layer.passes.read(direction)]
        if passes:
            place.copy_(torch.tensor(passes, dtype=torch.float64).mean(0))
    return times
