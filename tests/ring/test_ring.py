"""Rings of other shapes, both ways of communication, and slow links.

A short list of cases: what travels does not depend on the method, and the other files have every method on
every shape of ring.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_mtrain import ring
from tests.oracle import dense_mask, minfer_mask, moba_mask, xattn_mask
from tests.ring.cases import Case, check, write_pattern

FIXED = ["vertical_and_slash", 20, 4, 1]
PROBE = {"last_q": 16, "sink_tokens": 3, "local_window": 5}
CHUNKS = {"chunk_size": 48, "topk": 3}
CELLS = {"granularity": 16, "stride": 4, "threshold": 0.8}
FIELDS = {
    "dense": {"block_size": 16},
    "zigzag_ring": {"block_size": 16},
    "stripe_ring": {"block_size": 16},
    "minfer": {"block_size": 16, **PROBE},
    "moba": {"block_size": 16, "moba_chunk_size": CHUNKS["chunk_size"], "moba_topk": CHUNKS["topk"]},
    "xattn": CELLS,
}


def run(gang, tmp_path, shape, kind, **fields):
    """Checks one case of `kind` against naive attention."""
    given = {**FIELDS[kind], **fields}
    if kind == "minfer":
        given["pattern_config_name"] = write_pattern(tmp_path / "pattern.json", [[FIXED] * 4])
    case = Case(kind, given, 192 if 3 in shape else 256, heads=4, groups=2)
    masks = {
        "minfer": lambda q, k: minfer_mask(q, k, [(None, 20, None, 4)] * 4, block_size=16, **PROBE),
        "moba": lambda q, k: moba_mask(q, k, **CHUNKS),
        "xattn": lambda q, k: xattn_mask(q, k, **CELLS, scale=None),
    }
    check(gang, shape, case, masks.get(kind, lambda q, k: dense_mask(1, 4, case.num_tokens)))


@pytest.mark.parametrize("shape", [[1], [3], [2, 2], [2, 3]], ids=str)
@pytest.mark.parametrize("kind", FIELDS)
def test_gathered_shards_give_the_same(gang, tmp_path, shape, kind):
    run(gang, tmp_path, shape, kind, ring_comm="allgather")


@pytest.mark.parametrize("shape", [[2, 3], [4, 2]], ids=str)
@pytest.mark.parametrize("kind", FIELDS)
def test_rings_of_rings(gang, tmp_path, shape, kind):
    run(gang, tmp_path, shape, kind)


def test_gathered_in_zigzag_order(gang, tmp_path):
    run(gang, tmp_path, [4, 2], "minfer", ring_comm="allgather", implementation="zigzag")


@dataclass(frozen=True)
class Exact:
    """Which shards a rank saw, and what came home, for whole numbers that float32 adds without rounding."""

    how: str

    def __call__(self, rings, rank, beside):
        rings = ring.communicate(rings, self.how)
        size = ring.world(rings)[1]
        shard = (torch.full((2, 3), 100.0 * beside + rank), torch.full((4,), float(rank)))
        seen = [(source, int(key[0, 0]), int(value[0])) for source, (key, value) in ring.visit(shard, rings)]
        calls = []

        def grad(source, held):
            calls.append((source, int(held[0][0, 0]), int(held[1][0])))
            return torch.full((2, 3), float(size**rank)), torch.full((4,), float(rank * size + source))

        home = ring.bring_home(shard, rings, grad)
        return seen, calls, [tensor.numpy() for tensor in home], [tensor[0].tolist() for tensor in shard]


@pytest.mark.parametrize("how", ring.COMMUNICATION)
@pytest.mark.parametrize("shape", [[1], [2], [3], [8], [1, 4], [4, 1], [2, 2], [2, 3], [4, 2]], ids=str)
def test_every_shard_is_seen_once_and_every_share_comes_home(gang, shape, how):
    for beside, ranks in enumerate(gang.run(shape, Exact(how))):
        size = len(ranks)
        everything = [(source, 100 * beside + source, source) for source in range(size)]
        for rank, (seen, calls, (dk, dv), own) in enumerate(ranks):
            assert seen[0][0] == rank
            assert sorted(seen) == sorted(calls) == everything
            assert np.array_equal(dk, np.full((2, 3), sum(size**other for other in range(size))))
            assert np.array_equal(dv, np.full(4, sum(other * size + rank for other in range(size))))
            assert own == [[100.0 * beside + rank] * 3, float(rank)]  # nobody wrote to what was lent


def test_unknown_communication_is_refused():
    with pytest.raises(ValueError, match="unknown ring_comm 'tree'; choose one of ring, allgather"):
        ring.communicate([], "tree")


STEP = 0.05  # seconds of compute a ring step, in sleep: it needs no core
SLOW = 0.2  # seconds a message takes from one node to another
NODE = 4  # ranks


class SlowLinks:
    """dist.batch_isend_irecv whose messages to another node take SLOW seconds each, one behind the other.

    A group has links of its own. Messages within a node go as they are.
    """

    def __init__(self):
        self.links = {}

    def __call__(self, operations):
        return [self._start(operation) for operation in operations]

    def _start(self, operation):
        peer = dist.get_global_rank(operation.group, operation.group_peer)
        slow = operation.op is dist.isend and peer // NODE != dist.get_rank() // NODE
        if not slow:
            return _post(operation)
        link = self.links.setdefault(operation.group, ThreadPoolExecutor(1))
        return _Sending(link.submit(_late, operation))


class _Sending:
    def __init__(self, future):
        self.wait = future.result


def _late(operation):
    time.sleep(SLOW)
    _post(operation).wait()


def _post(operation):
    side = "group_dst" if operation.op is dist.isend else "group_src"
    peer = {side: operation.group_peer}
    return operation.op(operation.tensor, group=operation.group, tag=operation.tag, **peer)


def slow_rounds(rings, rank, beside):
    """Seconds of (forward, backward) over slow links, after a round that opens the connections."""

    def grad(source, held):
        time.sleep(STEP)
        return (torch.ones(8),)

    shard = (torch.full((8,), float(rank)),)
    ring.bring_home(shard, rings, lambda source, held: (torch.ones(8),))
    links, plain = SlowLinks(), dist.batch_isend_irecv
    dist.batch_isend_irecv = links
    try:
        dist.barrier()
        begin = time.perf_counter()
        for _ in ring.visit(shard, rings):
            time.sleep(STEP)
        dist.barrier()
        middle = time.perf_counter()
        (home,) = ring.bring_home(shard, rings, grad)
        dist.barrier()
        end = time.perf_counter()
    finally:
        dist.batch_isend_irecv = plain
        for pool in links.links.values():
            pool.shutdown()
    assert home.tolist() == [8.0] * 8
    return middle - begin, end - middle


@pytest.mark.skipif(torch.cuda.device_count() >= 8, reason="the delay is in gloo's sends")
def test_two_levels_hide_slow_links(gang):
    flat, two_level = (np.max(gang.run(shape, slow_rounds)[0], axis=0) for shape in ([8], [4, 2]))
    # A flat ring waits for the slow link in each of 7 hops: 1.4 s and more. Two levels use it once: in the
    # forward behind 4 steps of 0.05 s, 0.4 s in all; in the backward behind half a round each way, 0.6 s.
    assert flat.min() > 6 * SLOW
    for name, slow, fast in zip(("forward", "backward"), flat, two_level, strict=True):
        assert fast < 0.75 * slow, f"{name}: flat {slow:.3f} s, two levels {fast:.3f} s"
