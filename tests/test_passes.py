"""Times of ring steps on a made-up clock, and what a rank says of where it stands."""

import pytest

from megatron_mtrain import guards, passes
from megatron_mtrain.passes import Passes


@pytest.fixture
def clock(monkeypatch):
    """A clock that shows the given seconds, one after another."""
    hands = []
    monkeypatch.setattr(passes, "now", lambda: hands.pop(0))
    return hands


def play(layer: Passes, direction: str, count: int) -> None:
    steps = layer.start(direction, count)
    for _ in range(count):
        with steps.next():
            pass
    steps.end()


def test_steps_wait_before_they_compute(clock):
    """What is waited for after the last step belongs to it."""
    layer = Passes(3)
    layer.timed = lambda: True
    clock += [0.0, 1.0, 3.0, 3.5, 7.5, 8.0]
    play(layer, "backward", 2)
    assert layer.read("backward") == [[(1000, 2000), (1000, 4000)]]
    assert layer.read("backward") == layer.read("forward") == []


def test_no_time_is_taken_unless_asked_for(clock):
    layer = Passes(3)
    play(layer, "forward", 2)  # an empty clock would raise
    assert layer.read("forward") == []


def test_a_rank_knows_its_ring_step():
    steps = Passes(3).start("forward", 2)
    assert guards._place == "last in the forward of layer 3, ring step 0 of 0 .. 1"
    with steps.next():
        pass
    assert guards._place == "last in the forward of layer 3, ring step 1 of 0 .. 1"
    with pytest.raises(RuntimeError), steps.next():
        raise RuntimeError("a step that fails is the last one that is named")
    assert guards._place.endswith("ring step 1 of 0 .. 1")
