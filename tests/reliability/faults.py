"""Faults in a training process: at a named place of a named step a rank dies, hangs or meets a bad value."""

import functools
import os
import resource
import signal
import time
from pathlib import Path

import torch
from megatron.training import get_args, training

from megatron_mtrain import core_attention
from megatron_mtrain.passes import Passes


def kill(*_tensors) -> None:
    """Dies as an out-of-memory kill does: nothing is flushed, closed or said."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang(*_tensors) -> None:
    """Stops taking part, without an error."""
    time.sleep(300)


def terminate(*_tensors) -> None:
    """What a scheduler sends before the time is up."""
    os.kill(os.getpid(), signal.SIGTERM)


def fill(*_tensors) -> None:
    """From now on no file of this process or its children can grow: the disk is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))


FULL = 60_000  # bytes: the log fits, a rank's part of a checkpoint does not
ACTS = {"kill": kill, "hang": hang, "term": terminate, "full": fill}
BAD = {"nan": float("nan"), "inf": float("inf")}
LAYER = 1  # where faults in attention happen, zero-based


def install(losses: Path, fault) -> None:
    """Makes this process write its losses to a file, and `fault` happen."""
    stream = open(losses, "a", buffering=1)  # noqa: SIM115 - open for the life of the process
    original = training.training_log

    @functools.wraps(original)
    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, *more, **named):
        for loss in loss_dict.values():
            stream.write(f"{iteration} {float(loss).hex()}\n")
        return original(loss_dict, total_loss_dict, learning_rate, iteration, *more, **named)

    training.training_log = training_log
    if fault is not None:
        PLACES[fault.place](fault)


def _is_now(fault) -> bool:
    return get_args().curr_iteration + 1 == fault.step


def _in_forward(fault) -> None:
    """In the attention of layer LAYER; a bad value is put into its key."""
    see = core_attention.Watch.see

    def faulty(self, query, key, value):
        if self.layer == LAYER and _is_now(fault):
            if fault.act in ACTS:
                ACTS[fault.act]()
            else:
                key.data[3] = BAD[fault.act]
        return see(self, query=query, key=key, value=value)

    core_attention.Watch.see = faulty


def _in_ring(fault) -> None:
    """Before the first exchange of the forward of layer LAYER: the others have their own shard only."""
    start = Passes.start

    def faulty(self, direction, count):
        if (self.layer, direction) == (LAYER, "forward") and _is_now(fault):
            ACTS[fault.act]()
        return start(self, direction, count)

    Passes.start = faulty


def _in_backward(fault) -> None:
    """When the backward reaches the value of layer LAYER; a bad value takes the place of its gradient."""
    see = core_attention.Watch.see

    def arrive(gradient):
        if not _is_now(fault):
            return None
        if fault.act in ACTS:
            ACTS[fault.act]()
            return None
        return torch.full_like(gradient, BAD[fault.act])

    def faulty(self, query, key, value):
        if self.layer == LAYER and value.requires_grad:
            value.register_hook(arrive)
        return see(self, query=query, key=key, value=value)

    core_attention.Watch.see = faulty


def _in_optimizer(fault) -> None:
    """Between the gradients and the new weights."""
    setup = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args, **named):
        model, optimizer, *more = setup(*args, **named)
        update = optimizer.step

        def step():
            if _is_now(fault):
                ACTS[fault.act]()
            return update()

        optimizer.step = step
        return model, optimizer, *more

    training.setup_model_and_optimizer = setup_model_and_optimizer


PLACES = {"forward": _in_forward, "ring": _in_ring, "backward": _in_backward, "optimizer": _in_optimizer}
