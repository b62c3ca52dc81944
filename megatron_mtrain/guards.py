"""What a rank can say when a run ends with an error: the layer that first met NaN or Inf, and where it stood.

Megatron stops a run before the optimizer step when a loss or a gradient is not finite, but does not know
where that began. Every attention layer therefore keeps the largest magnitude of its query, key and value and
of their gradients, on the device: NaN and Inf survive in a maximum. Nobody reads these numbers, and nothing
waits for the device, until the run has ended.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakSet

import torch

_watches: "WeakSet[Watch]" = WeakSet()
_place = "before the first attention layer"


def stand(place: str) -> None:
    """Notes where this rank is, for the message of an error: "last in ..."."""
    global _place
    _place = place


class Watch:
    """The largest magnitudes that one layer (zero-based, in the whole model) has met, by name."""

    def __init__(self, layer: int):
        self.layer = layer
        self.largest: dict[str, torch.Tensor] = {}
        _watches.add(self)

    def see(self, **tensors: torch.Tensor) -> None:
        """Takes note of tensors of any shape, now, and of their gradients when the backward reaches them."""
        stand(f"last in the forward of layer {self.layer}")
        for name, tensor in tensors.items():
            self._note(name, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note_gradient, name))

    def bad(self, *, gradients: bool) -> list[str]:
        """Names of the tensors, or of the gradients, that were not finite. Waits for the device."""
        return [
            f"{name} ({'NaN' if math.isnan(value) else 'Inf'})"
            for name, value in ((name, float(largest)) for name, largest in self.largest.items())
            if name.startswith("gradient") == gradients and not math.isfinite(value)
        ]

    @torch.no_grad()
    def _note(self, name: str, tensor: torch.Tensor) -> None:
        largest = torch.linalg.vector_norm(tensor.detach(), torch.inf)
        known = self.largest.get(name)
        self.largest[name] = largest if known is None else torch.maximum(known, largest)

    def _note_gradient(self, name: str, gradient: torch.Tensor) -> None:
        stand(f"last in the backward of layer {self.layer}")
        self._note(f"gradient of {name}", gradient)


def first_not_finite() -> str:
    """Where this rank first met NaN or Inf: one sentence, empty when there are no layers. Waits for the
    device.

    In the forward that is the first layer with a bad tensor, in the backward the last one.
    """
    watches = sorted(_watches, key=lambda watch: watch.layer)
    for gradients, order in ((False, watches), (True, reversed(watches))):
        for watch in order:
            if found := watch.bad(gradients=gradients):
                return f"NaN or Inf was first met in layer {watch.layer}: {', '.join(found)}"
    if not watches:
        return ""
    return (
        f"query, key, value and their gradients were finite in layers {watches[0].layer} .. "
        f"{watches[-1].layer} of this rank"
    )


@contextmanager
def explained() -> Iterator[None]:
    """Adds to an error that leaves the block where this rank stood, and where NaN or Inf began."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        try:
            found = first_not_finite()
        except RuntimeError as broken:  # the device itself may be what failed
            found = f"what the layers met cannot be read ({broken})"
        note = f"rank {os.environ.get('RANK', '0')} was {_place}" + (f"; {found}" if found else "")
        if isinstance(error, SystemExit):
            sys.stderr.write(f"{note}\n")
        error.add_note(note)
        raise
