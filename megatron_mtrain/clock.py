"""Moments on the device's own time line, and the time between two of them; to take one waits for nobody."""

import time

import torch

Moment = float | torch.cuda.Event


def now() -> Moment:
    """A CUDA event on the current stream; on a CPU the clock, in seconds."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Moment, end: Moment) -> float:
    """From `begin` to `end`; both have to be over, synchronise before."""
    return (end - begin) * 1000 if isinstance(begin, float) else begin.elapsed_time(end)
