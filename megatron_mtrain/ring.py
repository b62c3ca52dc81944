"""How shards travel: every rank sees every shard once, over one ring or over rings of rings.

`rings` is a list of process groups, inner to outer. Rank i of the inner group and rank o of the outer one is
rank o * inner_size + i of the whole; an empty list is a single rank. A ring of one never touches the network.

On rings [inner, outer] a shard makes a full inner round between two outer hops, and the outer transfer is in
flight during that whole round: the slow link has W_inner steps of compute to hide behind (MTraining, section
4).

Every exchange sends to the next rank and receives from the previous one, so after t hops a rank holds the
shard of rank r - t. Receives go to two buffers in turn, allocated once a round.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

Shard = tuple[torch.Tensor, ...]
Rings = Sequence[Any]


def world(rings: Rings) -> tuple[int, int]:
    """(rank, size) of this process in the whole of `rings`."""
    rank, size = 0, 1
    for group in rings:
        rank += size * dist.get_rank(group)
        size *= dist.get_world_size(group)
    return rank, size


def visit(shard: Shard, rings: Rings) -> Iterator[tuple[int, Shard]]:
    """Yields (source, shard of that rank) for every rank, this one first.

    shard is a tuple of contiguous tensors, shaped alike on all ranks. What is yielded may be read until the
    next one is asked for; then its memory receives another shard. Iterate to the end: the peers wait for it.
    """
    if not rings:
        yield 0, shard
        return
    *inner, ring = rings
    inner_size = world(inner)[1]
    for owner, held in _rounds(shard, ring):
        for source, visiting in visit(held, inner):
            yield owner * inner_size + source, visiting


def bring_home(shard: Shard, rings: Rings, grad: Callable[[int, Shard], Shard]) -> Shard:
    """The gradient of this rank's shard, summed over all ranks that saw it.

    `grad(source, shard)` is called once per visiting shard and returns this rank's share of its gradient, in
    new tensors (float32 or wider: they accumulate). A partial sum follows its shard one hop behind and is
    received while `grad` computes the next share.
    """
    if not rings:
        return grad(0, shard)
    *inner, ring = rings
    rank, size = world([ring])
    inner_size = world(inner)[1]
    arriving = None
    for owner, held in _rounds(shard, ring):

        def share(source: int, visiting: Shard, owner=owner) -> Shard:
            return grad(owner * inner_size + source, visiting)

        mine = bring_home(held, inner, share)
        if size == 1:
            return mine
        if arriving is not None:
            for own, received in zip(mine, arriving.wait(), strict=True):
                own.add_(received)
        spare = arriving.sent if arriving is not None else None
        arriving = _Hop(mine, ring, rank, size, buffers=spare, tag=len(shard))
    return arriving.wait()


def all_reduce(tensor: torch.Tensor, rings: Rings) -> torch.Tensor:
    """The sum of `tensor` over all ranks, in place."""
    for group in rings:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


def all_gather(tensor: torch.Tensor, rings: Rings) -> torch.Tensor:
    """The tensors of all ranks, in rank order: [W, *shape]."""
    gathered = tensor[None].contiguous()
    for group in rings:
        size = dist.get_world_size(group)
        if size > 1:
            parts = gathered.new_empty(size, *gathered.shape)
            dist.all_gather(list(parts.unbind(0)), gathered, group=group)
            gathered = parts.flatten(0, 1)
    return gathered


def _rounds(shard: Shard, ring) -> Iterator[tuple[int, Shard]]:
    """The shards of one ring, each with its owner; the next is in flight while one is in use."""
    rank, size = world([ring])
    held, spare = shard, None
    for hop in range(size):
        arriving = _Hop(held, ring, rank, size, buffers=spare) if hop < size - 1 else None
        yield (rank - hop) % size, held
        if arriving is not None:
            spare = held if hop > 0 else None
            held = arriving.wait()


class _Hop:
    """One exchange in flight: `tensors` to the next rank of the ring, the previous rank's into `buffers`."""

    def __init__(
        self, tensors: Shard, ring, rank: int, size: int, *, buffers: Shard | None = None, tag: int = 0
    ):
        self.sent = tensors
        self.received = buffers or tuple(torch.empty_like(tensor) for tensor in tensors)
        after, before = (rank + 1) % size, (rank - 1) % size
        operations = []
        for number, (sent, received) in enumerate(zip(tensors, self.received, strict=True)):
            # The tag keeps keys, values and their gradients apart where the backend matches by tag (gloo).
            operations.append(dist.P2POp(dist.isend, sent, group=ring, group_peer=after, tag=tag + number))
            operations.append(
                dist.P2POp(dist.irecv, received, group=ring, group_peer=before, tag=tag + number)
            )
        self.requests = dist.batch_isend_irecv(operations)

    def wait(self) -> Shard:
        """The received tensors, ready for use on the current stream."""
        for request in self.requests:
            request.wait()
        return self.received
