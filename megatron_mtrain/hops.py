"""One exchange between neighbours of a ring, and the communicators that exchanges run on."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Shard = tuple[torch.Tensor, ...]


class Hop:
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


_twins: dict[Any, Any] = {}


def twin(group):
    """A second communicator of the ranks of `group`: what it carries never queues behind what the group does.

    Made when it is first asked for, which all ranks of the group do together, then kept.
    """
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
