"""The passes of a layer round the ring, step by step: where a rank stands, and how long steps take.

The place goes into guards.py at every step, for the message of a run that ends with an error. Times are taken
only while somebody asks for them (--log-ring-timing): moments of clock.py at the beginning and the end of
every step's compute. What lies between two steps is waiting: for the next shard to arrive and, in the
backward, adding partial sums of gradients.
"""

from collections.abc import Callable

from . import guards
from .clock import Moment, milliseconds, now

DIRECTIONS = ("forward", "backward")


class Passes:
    """The passes of layer number `layer` (zero-based, in the whole model) and the moments of those that are
    timed; `timed()` says whether the next one is."""

    def __init__(self, layer: int):
        self.layer = layer
        self.timed: Callable[[], bool] = lambda: False
        self.moments: dict[str, list[list[Moment]]] = {direction: [] for direction in DIRECTIONS}

    def start(self, direction: str, steps: int) -> "Pass":
        """A pass of `steps` steps, "forward" or "backward"."""
        moments = None
        if self.timed():
            moments = []
            self.moments[direction].append(moments)
        return Pass(f"the {direction} of layer {self.layer}", steps, moments)

    def read(self, direction: str) -> list[list[tuple[float, float]]]:
        """(wait, compute) in ms of every step of every timed pass, which are then forgotten.

        The passes have to be over. The wait of a step precedes it; what follows the last step is its too.
        """
        timed, self.moments[direction] = self.moments[direction], []
        return [_steps(moments) for moments in timed]


def _steps(moments: list[Moment]) -> list[tuple[float, float]]:
    gaps = [milliseconds(*pair) for pair in zip(moments, moments[1:], strict=False)]
    *waits, last = gaps[::2]
    waits[-1] += last
    return list(zip(waits, gaps[1::2], strict=True))


class Pass:
    """One pass under way: `with` around the compute of every step, `end` after all of them."""

    def __init__(self, name: str, steps: int, moments: list[Moment] | None):
        self.name, self.steps, self.moments, self.step = name, steps, moments, 0
        self._stand()
        self._mark()

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, kind, *_error) -> None:
        self._mark()
        self.step += 1
        if kind is None and self.step < self.steps:
            self._stand()

    def end(self) -> None:
        """Everything has been received."""
        self._mark()
        guards.stand(f"last in {self.name}")

    def _stand(self) -> None:
        guards.stand(f"last in {self.name}, ring step {self.step} of 0 .. {self.steps - 1}")

    def _mark(self) -> None:
        if self.moments is not None:
            self.moments.append(now())
