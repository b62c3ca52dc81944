"""When ring steps compute and when they wait: the events of ring.py, run against a model of the links.

The order of events is not written down here: `program` runs the generators of megatron_mtrain/ring.py once
for a virtual rank, with a recorder in place of the network, and `simulate` plays the programs of all ranks.
An exchange starts when both sides have posted it and the link is free, and takes latency + bytes / bandwidth.
A rank sends over NVLink (or PCIe) within its node and over its own network card, or one that it shares,
between nodes; messages on one link queue, whatever communicator they belong to.

Times are in seconds, sizes in bytes, bandwidths in bytes a second and direction.
"""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

from megatron_mtrain import ring


@dataclass(frozen=True)
class Link:
    """Bytes a second in one direction, and seconds before the first byte arrives."""

    bandwidth: float
    latency: float


# What well-tuned send / receive reaches, of the nominal 450 (NVLink 4), 300 (NVLink 3), 32 (PCIe 4 x16), 25
# (HDR) and 50 GB/s (NDR).
LINKS = {
    "nvlink4": Link(350e9, 5e-6),
    "nvlink3": Link(235e9, 6e-6),
    "pcie4": Link(24e9, 10e-6),
    "hdr": Link(22e9, 12e-6),
    "ndr": Link(45e9, 12e-6),
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of `node_size` GPUs with `cards` network cards each, and their links by name or as Link."""

    node_size: int = 8
    cards: int = 8
    inner: Link = LINKS["nvlink4"]
    outer: Link = LINKS["ndr"]

    def link(self, sender: int, receiver: int) -> tuple[Link, tuple]:
        """The link from a global rank to another, and the name under which its messages queue."""
        node, place = divmod(sender, self.node_size)
        if node == receiver // self.node_size:
            return self.inner, ("inner", sender)
        return self.outer, ("outer", node, place * self.cards // self.node_size)


@dataclass(frozen=True)
class Group:
    """A process group of virtual ranks: global ranks, this rank's place, and whether it carries gradients."""

    ranks: tuple[int, ...]
    place: int
    twin: bool = False


def groups_of(rank: int, shape: tuple[int, ...]) -> list[Group]:
    """The groups of `rank`, inner to outer, of rings of `shape`."""
    groups, stride = [], 1
    for size in shape:
        place = rank // stride % size
        first = rank - place * stride
        groups.append(Group(tuple(first + i * stride for i in range(size)), place))
        stride *= size
    return groups


class _Tensor(int):
    """A tensor as its number of bytes."""

    def add_(self, other):
        return self


class _Groups:
    """What ring.py asks torch.distributed for, answered by virtual groups."""

    @staticmethod
    def get_rank(group: Group) -> int:
        return group.place

    @staticmethod
    def get_world_size(group: Group) -> int:
        return len(group.ranks)


def program(rank: int, shape, *, backward: bool, key_bytes: int, grad_bytes: int) -> list[tuple]:
    """What `rank` does in a pass of ring.py, in order.

    ("compute", source), ("post", group, to, source, bytes) with global ranks, or ("wait", n) for the n-th
    post. key_bytes and grad_bytes are those of one shard's keys and values and of their gradients.
    """
    events: list[tuple] = []

    class Recorder:
        def __init__(self, tensors, group: Group, to: int, source: int, *, buffers=None):
            peers = (group.ranks[peer % len(group.ranks)] for peer in (to, source))
            self.number = sum(event[0] == "post" for event in events)
            self.sent = tensors
            events.append(("post", (group.ranks, group.twin), *peers, int(tensors[0])))
            self.received = tensors

        def wait(self):
            events.append(("wait", self.number))
            return self.received

    def grad(source, shard):
        events.append(("compute", source))
        return (_Tensor(grad_bytes),)

    def twin(group):
        return Group(group.ranks, group.place, twin=True)

    rings, shard = groups_of(rank, tuple(shape)), (_Tensor(key_bytes),)
    with patch.multiple(ring, dist=_Groups, Hop=Recorder, twin=twin):
        if backward:
            ring.bring_home(shard, rings, grad)
        else:
            for source, _ in ring.visit(shard, rings):
                events.append(("compute", source))
    return events


@dataclass(frozen=True)
class Timeline:
    """A simulated pass: seconds until the last rank ends, seconds of compute of the busiest rank, and mean
    seconds that a rank waits (for messages; then for the last rank)."""

    total: float
    busiest: float
    waited: float

    @property
    def hidden(self) -> float:
        """The busiest rank's compute as a share of the whole time; 1: nothing but compute."""
        return self.busiest / self.total if self.total else 1.0


class Span(NamedTuple):
    """What a rank does from `begin` to `end`, in seconds: attend the shard of `source`, or wait (None)."""

    rank: int
    source: int | None
    begin: float
    end: float


class _Clocks(list):
    """The time of every rank, which moves when it attends `source`, or waits; noted in `spans`, if given."""

    def __init__(self, ranks: int, spans: list[Span] | None):
        super().__init__([0.0] * ranks)
        self.spans = spans

    def advance(self, rank: int, until: float, source: int | None = None) -> None:
        if self.spans is not None and until > self[rank]:
            self.spans.append(Span(rank, source, self[rank], until))
        self[rank] = until


def simulate(
    programs: list[list[tuple]], compute, cluster: Cluster, *, spans: list[Span] | None = None
) -> Timeline:
    """Plays the programs of all ranks; compute[rank][source] is seconds. Appends to `spans`, if given, what
    every rank does.

    Raises RuntimeError when ranks wait for what nobody sends.
    """
    clock, at = _Clocks(len(programs), spans), [0] * len(programs)
    posted: dict[tuple, tuple] = {}  # (group, sender, n-th of this sender in the group) -> (time, bytes, to)
    receives: dict[tuple, float] = {}
    counts: dict[tuple, int] = {}
    arrivals: dict[tuple, float] = {}
    posts: list[list[tuple]] = [[] for _ in programs]
    free: dict[tuple, float] = {}
    blocked: dict[tuple, int] = {}
    ready = [(0.0, rank) for rank in range(len(programs))]

    def match(key):
        """Starts the exchange `key` once both of its sides are there."""
        if key not in posted or key not in receives:
            return
        begin, size, receiver = posted[key]
        link, name = cluster.link(key[1], receiver)
        begin = max(begin, receives[key], free.get(name, 0.0))
        free[name] = begin + size / link.bandwidth
        arrivals[key] = free[name] + link.latency
        if key in blocked:
            waiting = blocked.pop(key)
            heapq.heappush(ready, (max(clock[waiting], arrivals[key]), waiting))

    while ready:
        _, rank = heapq.heappop(ready)
        if at[rank] == len(programs[rank]):
            continue
        event = programs[rank][at[rank]]
        if event[0] == "wait":
            key = posts[rank][event[1]]
            if key not in arrivals:
                blocked[key] = rank
                continue
            clock.advance(rank, max(clock[rank], arrivals[key]))
        elif event[0] == "compute":
            clock.advance(rank, clock[rank] + float(compute[rank][event[1]]), event[1])
        else:
            _, group, to, source, size = event
            number = counts[group, rank] = counts.get((group, rank), -1) + 1
            sending, receiving = (group, rank, number), (group, source, number)
            posted[sending], receives[receiving] = (clock[rank], size, to), clock[rank]
            posts[rank].append(receiving)
            match(sending)
            match(receiving)
        at[rank] += 1
        heapq.heappush(ready, (clock[rank], rank))
    if blocked or any(place < len(steps) for place, steps in zip(at, programs, strict=True)):
        raise RuntimeError(f"ranks {sorted(blocked.values())} wait for messages that nobody sends")
    work = [
        math.fsum(compute[r][e[1]] for e in steps if e[0] == "compute") for r, steps in enumerate(programs)
    ]
    total = max(clock)
    return Timeline(total, max(work), total - sum(work) / len(work))
