"""The passes of a layer round the ring, step by step: where a rank stands, and how long steps take.

The place goes into guards.py at every step, for the message of a run that ends with an error. Times are taken
only while somebody asks for them (--log-ring-timing): moments of clock.py at the beginning and the end of
every step's compute. What lies between two steps is waiting: for the next shard to arrive and, in the
backward, adding partial sums of gradients.
"""

from collections.abc import Callable
from itertools import pairwise

from . import guards
from .clock import Moment, milliseconds, now

DIRECTIONS = ("forward", "backward")


class Passes:
    """The passes of layer number `layer` (zero-based, in the whole model) and the moments of those that are
    timed; `timed()` says whether the next one is.
    """

    def __init__(self, layer: int):
        self.layer = layer
        self.timed: Callable[[], bool] = lambda: False
        self.moments: dict[str, list[list[Moment]]] = {direction: [] for direction in DIRECTIONS}

    def start(self, direction: str, count: int) -> "Steps":
        """A pass of `count` steps, "forward" or "backward"."""
        moments = None
        if self.timed():
            moments = []
            self.moments[direction].append(moments)
        return Steps(f"the {direction} of layer {self.layer}", count, moments)

    def read(self, direction: str) -> list[list[tuple[float, float]]]:
        """(wait, compute) in ms of every step of every timed pass; they are forgotten then.

        The passes have to be over. The wait of a step precedes it; what follows the last step is its too.
        """
        timed, self.moments[direction] = self.moments[direction], []
        return [_milliseconds(moments) for moments in timed]


def _milliseconds(moments: list[Moment]) -> list[tuple[float, float]]:
    gaps = [milliseconds(*pair) for pair in pairwise(moments)]
    *waits, last = gaps[::2]
    waits[-1] += last
    return list(zip(waits, gaps[1::2], strict=True))


class Steps:
    """One pass under way: `with steps.next()` around the compute of every step, `end` after the last one."""

    def __init__(self, name: str, count: int, moments: list[Moment] | None):
        self.name, self.count, self.moments, self.step = name, count, moments, 0
        self._begin()

    def next(self) -> "Steps":
        """The step that now has what it needs, as a context."""
        return self

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, kind, *_error) -> None:
        if kind is None:
            self.step += 1
            self._begin()

    def end(self) -> None:
        """Nothing is on its way any more."""
        self._mark()

    def _begin(self) -> None:
        """The wait for step number `step` begins; after the last one, for what is still on its way."""
        step = min(self.step, self.count - 1)
        guards.stand(f"last in {self.name}, ring step {step} of 0 .. {self.count - 1}")
        self._mark()

    def _mark(self) -> None:
        if self.moments is not None:
            self.moments.append(now())
