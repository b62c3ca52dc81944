"""What a training step spends its time on, measured inside Megatron's own loop; bench_train.py runs it.

Marks are laid at the seams where a part begins and ends, in the forward and, through identity functions of
autograd, in the backward: CUDA events on a GPU, which nobody waits for, the clock elsewhere. Nested parts
count for themselves alone: attention is without its index and without waiting for the ring.

Not told apart: tensor-parallel communication inside of the linear layers, and pipeline communication (other).
"""

from functools import partial, wraps

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP

from megatron_mtrain import core_attention, loss, ring
from megatron_mtrain.clock import milliseconds, now
from megatron_mtrain.index.sparse_index import SparseIndex

PARTS = ("attention", "index", "mlp", "projections", "loss", "optimizer", "communication", "other")


class Recorder:
    """The marks of the steps for which it is `on`."""

    def __init__(self):
        self.on, self.marks = False, []

    def mark(self, name: str, begins: bool) -> None:
        """Remembers that a part begins or ends here."""
        if self.on:
            self.marks.append((name, begins, now()))

    def milliseconds(self) -> dict[str, float]:
        """Time by part, all steps together; what lies between two steps belongs to none."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        total, inside = dict.fromkeys(PARTS, 0.0), []
        for number, (name, begins, at) in enumerate(self.marks):
            if inside:
                total[inside[-1]] += milliseconds(self.marks[number - 1][2], at)
            if begins:
                inside.append(name)
            elif name in inside:  # autograd may end two parts in another order
                inside.reverse()
                inside.remove(name)
                inside.reverse()
        return total

    def timed(self, name: str, call):
        """`call` as a part that has no gradient of its own."""

        @wraps(call)
        def run(*args, **kwargs):
            self.mark(name, True)
            try:
                return call(*args, **kwargs)
            finally:
                self.mark(name, False)

        return run

    def marked(self, name: str, call):
        """`call` as a part of the forward and of the backward: from its tensors to its (first) result."""

        @wraps(call)
        def run(*args, **kwargs):
            names = [key for key, value in kwargs.items() if _differentiable(value)]
            places = [at for at, value in enumerate(args) if _differentiable(value)]
            tensors = [args[at] for at in places] + [kwargs[key] for key in names]
            tensors = _Mark.apply(self, name, True, *tensors)
            args = list(args)
            for at, tensor in zip(places, tensors, strict=False):
                args[at] = tensor
            kwargs |= dict(zip(names, tensors[len(places) :], strict=True))
            out = call(*args, **kwargs)
            first, *rest = out if isinstance(out, tuple) else (out,)
            (first,) = _Mark.apply(self, name, False, first)
            return (first, *rest) if isinstance(out, tuple) else first

        return run


class _Mark(torch.autograd.Function):
    """Hands its tensors through; the backward passes the end of a part first."""

    @staticmethod
    def forward(ctx, recorder, name, begins, *tensors):
        ctx.recorder, ctx.name, ctx.begins = recorder, name, begins
        recorder.mark(name, begins)
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        ctx.recorder.mark(ctx.name, not ctx.begins)
        return None, None, None, *grads


def _differentiable(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2


def watch_modules(recorder: Recorder, models: list) -> None:
    """Marks the parts that are modules, in place."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, core_attention.SparseRingAttention):
            module.forward = recorder.marked("attention", module.forward)
        elif isinstance(module, MLP):
            module.forward = recorder.marked("mlp", module.forward)
        elif isinstance(module, SelfAttention):
            for linear in (module.linear_qkv, module.linear_proj):
                linear.forward = recorder.marked("projections", linear.forward)


def watch_functions(recorder: Recorder, patch=setattr) -> None:
    """Marks the parts that are functions of this package: loss, index and waiting for the ring.

    `patch(owner, name, value)` sets an attribute; a test gives one that undoes it.
    """
    patch(loss, "chunked_loss", recorder.marked("loss", loss.chunked_loss))
    patch(core_attention, "build_index", recorder.timed("index", core_attention.build_index))
    patch(ring.Hop, "wait", recorder.timed("communication", ring.Hop.wait))
    patch(ring.Gather, "__getitem__", recorder.timed("communication", ring.Gather.__getitem__))
    for kind in SparseIndex.__subclasses__():
        patch(kind, "tiles", recorder.timed("index", kind.tiles))


def watch_training(recorder: Recorder, optimizer, config) -> None:
    """Marks the optimizer and the reduction of gradients over data-parallel ranks."""
    optimizer.step = recorder.timed("optimizer", optimizer.step)
    config.finalize_model_grads_func = partial(
        recorder.timed("communication", _call), config.finalize_model_grads_func
    )


def _call(function, *args, **kwargs):
    return function(*args, **kwargs)
