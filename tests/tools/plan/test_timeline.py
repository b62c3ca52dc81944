"""The timeline of a ring, against times worked out by hand."""

import pytest

from tools.plan.timeline import Cluster, Link, groups_of, program, simulate


def programs(shape, size, *, backward=False, key_bytes=100, grad_bytes=200):
    how = {"backward": backward, "key_bytes": key_bytes, "grad_bytes": grad_bytes}
    return [program(rank, shape, **how) for rank in range(size)]


def time_of(shape, size, step, cluster, **how):
    compute = [[step] * size] * size
    return simulate(programs(shape, size, **how), compute, cluster)


def test_groups_are_those_of_the_ring_tests():
    inner, outer = groups_of(5, (4, 2))
    assert (inner.ranks, inner.place) == ((4, 5, 6, 7), 1)
    assert (outer.ranks, outer.place) == ((1, 5), 1)


def test_program_of_a_flat_forward():
    flat = ((0, 1, 2), False)
    assert program(1, (3,), backward=False, key_bytes=7, grad_bytes=9) == [
        ("post", flat, 2, 0, 7), ("compute", 1), ("wait", 0),
        ("post", flat, 2, 0, 7), ("compute", 0), ("wait", 1),
        ("compute", 2),
    ]  # fmt: skip


def test_program_of_a_flat_backward():
    keys, home = ((0, 1, 2), False), ((0, 1, 2), True)
    assert program(1, (3,), backward=True, key_bytes=7, grad_bytes=9) == [
        ("post", keys, 2, 0, 7), ("wait", 0), ("post", keys, 2, 0, 7),
        ("compute", 0), ("post", home, 2, 0, 9), ("wait", 1),
        ("compute", 2), ("wait", 2), ("post", home, 2, 0, 9),
        ("compute", 1), ("wait", 3),
    ]  # fmt: skip


ONE_NODE = Cluster(node_size=8, inner=Link(100.0, 0.5), outer=Link(1.0, 0.0))


@pytest.mark.parametrize(
    ("step", "total"),
    [(2.0, 8.0), (1.0, 5.5)],  # a hop takes 100 / 100 + 0.5 = 1.5 s: hidden; three times longer than a step
    ids=["hidden", "waits"],
)
def test_flat_forward(step, total):
    line = time_of((4,), 4, step, ONE_NODE)
    assert (line.total, line.busiest, line.waited) == (total, 4 * step, total - 4 * step)
    assert line.hidden == 4 * step / total


def test_flat_backward_waits_for_the_first_keys_alone():
    # 1.5 s for the first keys, then 4 steps of 4 s. In each the link has 200 + 100 bytes to carry: 3.5 s.
    assert time_of((4,), 4, 4.0, ONE_NODE, backward=True).total == 1.5 + 4 * 4.0
    # With steps of 3 s the third keys queue behind gradients and are 0.5 s late; no later hop is.
    assert time_of((4,), 4, 3.0, ONE_NODE, backward=True).total == 1.5 + 4 * 3.0 + 0.5


TWO_NODES = Cluster(node_size=2, cards=2, inner=Link(1e9, 0.0), outer=Link(50.0, 0.0))


def test_two_levels_hide_the_slow_link():
    # The slow hop takes 2 s. Flat: it is in every hop, 1 + 3 * 2 - (steps of 1 s are behind it) = 7 s.
    # Two levels: once, behind an inner round of 2 s.
    assert time_of((4,), 4, 1.0, TWO_NODES).total == pytest.approx(7.0, abs=1e-5)
    assert time_of((2, 2), 4, 1.0, TWO_NODES).total == pytest.approx(4.0, abs=1e-5)


def test_shared_cards_queue():
    shared = Cluster(node_size=2, cards=1, inner=Link(1e9, 0.0), outer=Link(50.0, 0.0))
    # Both ranks of a node send 2 s over one card: the second arrives at 4 s, after 2 s of compute.
    assert time_of((2, 2), 4, 1.0, shared).total == pytest.approx(6.0, abs=1e-5)


def test_uneven_work_is_waited_for():
    compute = [[4.0, 4.0], [1.0, 1.0]]
    line = simulate(programs((2,), 2), compute, ONE_NODE)
    assert (line.total, line.busiest, line.waited) == (8.0, 8.0, 3.0)


def test_a_rank_that_never_sends_is_a_deadlock():
    broken = programs((3,), 3)
    broken[0] = [event for event in broken[0] if event[0] == "compute"]
    with pytest.raises(RuntimeError, match="nobody sends"):
        simulate(broken, [[1.0] * 3] * 3, ONE_NODE)


def test_spans_tell_who_computes_and_who_waits():
    spans = []
    simulate(programs((2,), 2), [[4.0, 4.0], [1.0, 1.0]], ONE_NODE, spans=spans)
    of_rank = [[tuple(span[1:]) for span in spans if span.rank == rank] for rank in range(2)]
    assert of_rank[0] == [(0, 0.0, 4.0), (1, 4.0, 8.0)]
    assert of_rank[1] == [(1, 0.0, 1.0), (None, 1.0, 1.5), (0, 1.5, 2.5)]
