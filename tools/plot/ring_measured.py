"""Draw how long every step of the ring computed and waited, as a run measured it.

    python -m tools.plot.ring_measured runs/minfer --out ring.png

From a run with --log-ring-timing (megatron_mtrain/telemetry.py): means over ranks, layers and the last half
of the logged steps; ticks are the slowest rank.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy

from megatron_mtrain.passes import DIRECTIONS
from tools.plot.figures import (
    COLOURS,
    WAITING,
    NoData,
    legend_below,
    new_figure,
    output_parser,
    run_picture,
    with_grid,
)
from tools.plot.runs import Run, read_run

TIMES = ("compute_ms", "wait_ms", "compute_ms_max", "wait_ms_max")


@dataclass(frozen=True)
class Steps:
    """The steps of the ring in one direction: ms [n] of compute and of waiting, mean over ranks and slowest
    rank (NaN where it was not logged)."""

    direction: str
    numbers: list[int]
    compute: numpy.ndarray
    wait: numpy.ndarray
    slowest_compute: numpy.ndarray
    slowest_wait: numpy.ndarray


def measured(run: Run) -> list[Steps]:
    """Forward and backward, as far as they were logged. Raises NoData when neither was."""
    found = [steps for direction in DIRECTIONS if (steps := _steps(run, direction))]
    if not found:
        raise NoData(f"{run.folder} has no ring/forward/step_NN/compute_ms; train with --log-ring-timing")
    return found


def _steps(run: Run, direction: str) -> Steps | None:
    def last(what: str) -> dict[int, float]:
        series = run.numbered(rf"ring/{direction}/step_(\d+)/{what}")
        return {number: values.last_mean() for (number,), values in series.items()}

    kinds = [last(what) for what in TIMES]
    numbers = sorted({number for kind in kinds for number in kind})
    if not numbers:
        return None
    columns = [numpy.array([kind.get(number, numpy.nan) for number in numbers]) for kind in kinds]
    return Steps(direction, numbers, *columns)


def figure(found: list[Steps]):
    """A bar for every step of the ring: compute, and waiting on top."""
    picture, axes = new_figure(1, len(found), width=4.6 * len(found) + 0.6, height=4)
    for axis, steps in zip(axes[0], found, strict=True):
        compute, wait = numpy.nan_to_num(steps.compute), numpy.nan_to_num(steps.wait)
        axis.bar(steps.numbers, compute, color=COLOURS[0], label="computes")
        axis.bar(steps.numbers, wait, bottom=compute, color=WAITING, label="waits")
        ticks = {"marker": "_", "s": 120, "zorder": 3}
        axis.scatter(
            steps.numbers, steps.slowest_compute, color="black", label="slowest rank computes", **ticks
        )
        share = wait.sum() / max((compute + wait).sum(), 1e-12)
        axis.set_title(
            f"{steps.direction}: {(compute + wait).sum():.3g} ms, {share:.0%} of it waiting", fontsize=10
        )
        axis.set(xlabel="step of the ring", ylabel="ms")
        axis.set_xticks(range(min(steps.numbers), max(steps.numbers) + 1, -(-len(steps.numbers) // 16)))
        with_grid(axis)
    picture.suptitle("Measured: a layer's attention by step of the ring, mean over ranks", fontsize=11)
    legend_below(picture, axes[0, 0], order=("computes", "waits", "slowest rank computes"))
    return picture


def main() -> None:
    parser = output_parser(__doc__)
    parser.add_argument("run", type=Path, help="folder with TensorBoard events")
    run_picture(parser, lambda args: figure(measured(read_run(args.run))))


if __name__ == "__main__":
    main()
