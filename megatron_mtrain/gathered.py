"""The shards of all ranks fetched at once: for short rings on fast links, in place of a ring's hops."""

import torch.distributed as dist

from .hops import Shard


class Gathered(tuple):
    """Process groups, inner to outer, whose shards are gathered at once instead of passed round."""


class Gather:
    """The shards of all ranks, by rank; on their way until one that is not this rank's own is asked for.

    The outermost groups exchange first: a shard passes each slow link once, and only to ranks of the same
    place in their inner group, which then share what they have.
    """

    def __init__(self, shard: Shard, rings, rank: int):
        self.own, self.rank = shard, rank
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
