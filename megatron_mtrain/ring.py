"""How shards travel: every rank sees every shard once, over one ring or over rings of rings.

`rings` is a list of process groups, inner to outer. Rank i of the inner group and rank o of the outer one is
rank o * inner_size + i of the whole; an empty list is a single rank. A ring of one never touches the network.

On rings [inner, outer] a shard makes a full inner round between two outer hops, and the outer transfer is in
flight during that whole round: the slow link has W_inner steps of compute to hide behind (MTraining, section
4).

Every exchange sends to the next rank and receives from the previous one, so after t hops a rank holds the
shard of rank r - t. Receives go to two buffers in turn, allocated once a round. Gradients travel on twins
of the groups (hops.py), so that exchanges of keys and of gradients, inner and outer, never queue behind each
other.

`Gathered(rings)` in place of `rings` fetches all shards at once, for short rings on fast links: fewer, larger
messages, for the memory of W shards of keys and values.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .gathered import Gather, Gathered
from .hops import Hop, Shard, twin

Rings = Sequence[Any]
Grad = Callable[[int, Shard], Shard]
COMMUNICATION = ("ring", "allgather")


def communicate(rings: Rings, how: str) -> Rings:
    """`rings` made to exchange shards by `how`: "ring", hop by hop, or "allgather"."""
    if how not in COMMUNICATION:
        raise ValueError(f"unknown ring_comm {how!r}; choose one of {', '.join(COMMUNICATION)}")
    return Gathered(rings) if how == "allgather" else list(rings)


def world(rings: Rings) -> tuple[int, int]:
    """(rank, size) of this process in the whole of `rings`."""
    rank, size = 0, 1
    for group in rings:
        rank += size * dist.get_rank(group)
        size *= dist.get_world_size(group)
    return rank, size


def sources(rings: Rings) -> list[int]:
    """The ranks in the order in which `visit` yields their shards."""
    if isinstance(rings, Gathered) or not rings:
        rank, size = world(rings)
        return [(rank - distance) % size for distance in range(size)]
    *inner, ring = rings
    rank, size = world([ring])
    inside = sources(inner)
    return [(rank - hop) % size * len(inside) + source for hop in range(size) for source in inside]


def visit(shard: Shard, rings: Rings) -> Iterator[tuple[int, Shard]]:
    """Yields (source, shard of that rank) for every rank, this one first.

    shard is a tuple of contiguous tensors, shaped alike on all ranks. What is yielded may be read until the
    next one is asked for; then its memory receives another shard. Iterate to the end: the peers wait for it.
    """
    if isinstance(rings, Gathered):
        shards = Gather(shard, rings, world(rings)[0])
        for source in sources(rings):
            yield source, shards[source]
        return
    if not rings:
        yield 0, shard
        return
    *inner, ring = rings
    inner_size = world(inner)[1]
    for owner, held in _rounds(shard, ring):
        for source, visiting in visit(held, inner):
            yield owner * inner_size + source, visiting


def bring_home(shard: Shard, rings: Rings, grad: Grad) -> Shard:
    """The gradient of this rank's shard, summed over all ranks that saw it, in an order that never varies.

    `grad(source, shard)` is called once per visiting shard and returns this rank's share of its gradient, in
    new tensors (float32 or wider: they accumulate). A partial sum follows its shard one hop behind and is
    received while `grad` computes the next share. This rank's own share stays here and is computed last,
    while the sum of the others makes its last hop: W - 1 hops of gradients, all of them behind compute. The
    price is that the first hop of keys has nothing to hide behind: half the bytes of a last hop of gradients.
    On two levels the own inner round is cut in two: its first half hides the first outer hop of keys, its
    second half the last outer hop of gradients; only an inner hop of keys a round is waited for. That
    takes up to seven partial sums and six shards of keys at a time, where a flat ring takes three and two.
    """
    if isinstance(rings, Gathered):
        return _gathered_home(Gather(shard, rings, world(rings)[0]), 0, rings, grad)
    homing = _homing(shard, rings, grad)
    while True:
        try:
            next(homing)
        except StopIteration as end:
            return end.value


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
        arriving = Hop(held, ring, rank + 1, rank - 1, buffers=spare) if hop < size - 1 else None
        yield (rank - hop) % size, held
        if arriving is not None:
            spare = held if hop > 0 else None
            held = arriving.wait()


def _homing(shard: Shard, rings: Rings, grad: Grad) -> Generator[None, None, Shard]:
    """bring_home, step by step: yields after every call of `grad`, returns the sum."""
    if not rings:
        share = grad(0, shard)
        yield
        return share
    *inner, ring = rings
    rank, size = world([ring])
    inner_size = world(inner)[1]

    def one_round(owner: int, held: Shard):
        return _homing(held, inner, lambda source, visiting: grad(owner * inner_size + source, visiting))

    rounds = _rounds(shard, ring)
    own = one_round(*next(rounds))  # the first hop is in flight from here on
    if size == 1:
        return (yield from own)
    for _ in range(inner_size // 2):
        next(own)
        yield
    arriving = None
    for owner, held in rounds:
        mine = yield from one_round(owner, held)
        if arriving is not None:
            _add(mine, arriving.wait())
        spare = arriving.sent if arriving is not None else None
        arriving = Hop(mine, twin(ring), rank + 1, rank - 1, buffers=spare)
    mine = yield from own
    return _add(mine, arriving.wait())


def _gathered_home(shards: Gather, first: int, rings: Rings, grad: Grad) -> Shard:
    """bring_home over gathered shards: every share goes straight to the owner of its shard.

    `first` is the number of the first shard of these rings. Own share first, while shards are gathered; the
    share of rank r - t is sent to it, and one received from r + t, while the share of r - t - 1 is computed.
    """
    if not rings:
        return grad(first, shards[first])
    *inner, ring = rings
    rank, size = world([ring])
    inner_size = world(inner)[1]
    total = sending = None
    for distance in range(size):
        owner = (rank - distance) % size
        share = _gathered_home(shards, first + owner * inner_size, inner, grad)
        if sending is not None:
            _add(total, sending.wait())
        if distance == 0:
            total = share
        else:
            spare = sending.received if sending is not None else None
            sending = Hop(share, twin(ring), owner, rank + distance, buffers=spare)
    return total if sending is None else _add(total, sending.wait())


def _add(into: Shard, terms: Shard) -> Shard:
    for tensor, term in zip(into, terms, strict=True):
        tensor.add_(term)
    return into
