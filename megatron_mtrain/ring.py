"""How shards travel: every rank sees every shard once, over one ring or over rings of rings.

`rings` is a list of process groups, inner to outer. Rank i of the inner group and rank o of the outer one is
rank o * inner_size + i of the whole; an empty list is a single rank. A ring of one never touches the network.

On rings [inner, outer] a shard makes a full inner round between two outer hops, and the outer transfer is in
flight during that whole round: the slow link has W_inner steps of compute to hide behind (MTraining, section
4).

Every exchange sends to the next rank and receives from the previous one, so after t hops a rank holds the
shard of rank r - t. Receives go to two buffers in turn, allocated once a round. Each group has a twin, a
second communicator of the same ranks, for gradients on their way home: an exchange of keys and one of
gradients, inner or outer, never queue behind each other. A group that is used for the first time makes its
twin, so all of its ranks come here together, as they have to anyway.

`Gathered(rings)` in place of `rings` fetches all shards at once, for short rings on fast links: fewer, larger
messages, for the memory of W shards of keys and values.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Shard = tuple[torch.Tensor, ...]
Rings = Sequence[Any]
Grad = Callable[[int, Shard], Shard]
COMMUNICATION = ("ring", "allgather")


class Gathered(tuple):
    """Process groups, inner to outer, whose shards are gathered at once instead of passed round."""


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


def visit(shard: Shard, rings: Rings) -> Iterator[tuple[int, Shard]]:
    """Yields (source, shard of that rank) for every rank, this one first.

    shard is a tuple of contiguous tensors, shaped alike on all ranks. What is yielded may be read until the
    next one is asked for; then its memory receives another shard. Iterate to the end: the peers wait for it.
    """
    if isinstance(rings, Gathered):
        shards = _Gather(shard, rings)
        rank, size = world(rings)
        for distance in range(size):
            source = (rank - distance) % size
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
    second half the last outer hop of gradients; only an inner hop of keys a round is waited for.
    """
    if isinstance(rings, Gathered):
        return _gathered_home(_Gather(shard, rings), 0, rings, grad)
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
        arriving = _Hop(held, ring, rank + 1, rank - 1, buffers=spare) if hop < size - 1 else None
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
        arriving = _Hop(mine, twin(ring), rank + 1, rank - 1, buffers=spare)
    mine = yield from own
    return _add(mine, arriving.wait())


def _gathered_home(shards: "_Gather", first: int, rings: Rings, grad: Grad) -> Shard:
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
            sending = _Hop(share, twin(ring), owner, rank + distance, buffers=spare)
    return total if sending is None else _add(total, sending.wait())


def _add(into: Shard, terms: Shard) -> Shard:
    for tensor, term in zip(into, terms, strict=True):
        tensor.add_(term)
    return into


class _Hop:
    """One exchange in flight: `tensors` to a rank of the ring, those of another into `buffers`.

    Ranks are taken modulo the size of the ring.
    """

    def __init__(self, tensors: Shard, ring, to: int, source: int, *, buffers: Shard | None = None):
        self.sent = tensors
        self.received = buffers or tuple(torch.empty_like(tensor) for tensor in tensors)
        size = dist.get_world_size(ring)
        operations = []
        for tag, (sent, received) in enumerate(zip(tensors, self.received, strict=True)):
            # The tag keeps keys and values apart where the backend matches by tag (gloo).
            operations.append(dist.P2POp(dist.isend, sent, group=ring, group_peer=to % size, tag=tag))
            operations.append(dist.P2POp(dist.irecv, received, group=ring, group_peer=source % size, tag=tag))
        self.requests = dist.batch_isend_irecv(operations)

    def wait(self) -> Shard:
        """The received tensors, ready for use on the current stream."""
        for request in self.requests:
            request.wait()
        return self.received


class _Gather:
    """The shards of all ranks, by rank; on their way until one that is not this rank's own is asked for.

    The outermost groups exchange first: a shard passes each slow link once, and only to ranks of the same
    place in their inner group, which then share what they have.
    """

    def __init__(self, shard: Shard, rings: Rings):
        self.own, self.rank = shard, world(rings)[0]
        self.left = list(rings)
        self.parts, self.sizes = shard, ()
        self.requests: list = []
        self._send()

    def __getitem__(self, source: int) -> Shard:
        if source == self.rank:
            return self.own
        while self.requests:
            for request in self.requests:
                request.wait()
            self._send()
        place, index = source, []
        for size in self.sizes:
            index.append(place % size)
            place //= size
        return tuple(part[tuple(index)] for part in self.parts)

    def _send(self) -> None:
        """Starts the exchange among the outermost group that is left; parts become [size, *its shape]."""
        self.requests = []
        if not self.left:
            return
        group = self.left.pop()
        size = dist.get_world_size(group)
        if size == 1:
            self.parts, self.sizes = tuple(part[None] for part in self.parts), (1, *self.sizes)
            return self._send()
        held, self.parts = self.parts, tuple(part.new_empty(size, *part.shape) for part in self.parts)
        self.sizes = (size, *self.sizes)
        for part, whole in zip(held, self.parts, strict=True):
            self.requests.append(
                dist.all_gather_into_tensor(whole.flatten(0, 1), part, group=group, async_op=True)
            )


_twins: dict[Any, Any] = {}


def twin(group):
    """A second communicator of the ranks of `group`, made when all of them first ask for it, then kept."""
    if group not in _twins:
        _twins[group] = _make_twin(group)
    return _twins[group]


def _make_twin(group):
    default = c10d._get_default_group()
    group = default if group is None else group
    ranks = dist.get_process_group_ranks(group)
    if default.bound_device_id is not None and dist.get_backend(group) == "nccl":
        # NCCL communicators of a bound device are split off their parent, which has to be in use for that.
        dist.barrier(group)
        return dist.split_group(group, [list(range(len(ranks)))], group_desc="gradients")
    # new_group wants every process of the job; with use_local_synchronization it names the group after the
    # number of groups that this process is in, which ranks need not agree on. The parent's name is shared.
    backend, _ = c10d._world.pg_map[group]
    _, store = c10d._world.pg_map[default]
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        c10d.Backend(backend),
        store,
        f"{group.group_name}/gradients",
        timeout=c10d._get_default_timeout(c10d.Backend(backend)),
        group_desc="gradients",
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made
