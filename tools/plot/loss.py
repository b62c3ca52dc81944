"""Draw the loss curves of one or several runs, smoothed over the raw values.

    python -m tools.plot.loss runs/dense runs/minfer --by tokens --out loss.png

A run is the folder that --tensorboard-dir named, or one above it; its name is the label. The thick line is
the mean of as many values as --window says, those before and after in equal number, so it does not lag; dots
are validation losses.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy
from matplotlib.ticker import EngFormatter

from tools.plot.figures import (
    NoData,
    legend_below,
    line_style,
    new_figure,
    output_parser,
    run_picture,
    with_grid,
)
from tools.plot.runs import Run, names_of, read_run

LOSS, VALIDATION, SAMPLES = "lm loss", "lm loss validation", " vs samples"
UNITS = ("steps", "tokens")


@dataclass(frozen=True)
class Curve:
    """The loss of one run: x in `unit`, raw and smoothed nats a token [n], their mean at the end, and
    validation as (x, values)."""

    name: str
    unit: str
    x: numpy.ndarray
    raw: numpy.ndarray
    smooth: numpy.ndarray
    last: float
    validation: tuple[numpy.ndarray, numpy.ndarray]


def smoothed(values: numpy.ndarray, window: int) -> numpy.ndarray:
    """Means of `window` values around each; of fewer towards the ends, as many before as after. A value that
    is no number stays a gap and is in no mean."""
    places = numpy.arange(len(values))
    half = numpy.minimum(numpy.minimum(places, places[::-1]), window // 2)
    known = numpy.isfinite(values)
    sums, counts = (
        numpy.concatenate([[0.0], numpy.cumsum(numbers)])
        for numbers in (numpy.where(known, values, 0), known)
    )
    total, count = (run[places + half + 1] - run[places - half] for run in (sums, counts))
    return numpy.where(known, total / numpy.maximum(count, 1), numpy.nan)


def curve(run: Run, name: str, *, unit: str = "steps", window: int | None = None) -> Curve:
    """The loss of a run over steps or tokens; the default window is a twentieth of the run.

    Raises NoData for a run without losses, or without what counts its tokens.
    """
    (x, raw), validation = _points(run, LOSS, unit), (numpy.empty(0), numpy.empty(0))
    if run.has(VALIDATION):
        validation = _points(run, VALIDATION, unit)
    window = window or max(5, len(raw) // 20)
    return Curve(name, unit, x, raw, smoothed(raw, window), float(raw[-window:].mean()), validation)


def _points(run: Run, tag: str, unit: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    if unit == "steps":
        series = run.series(tag)
        return series.steps, series.values
    length = run.argument("seq_length", int)
    if length is None:
        raise NoData(f"{run.folder} does not say its sequence length, so tokens cannot be counted; use steps")
    series = run.series(tag + SAMPLES)
    return series.steps * length, series.values


def figure(curves: list[Curve]):
    """All curves in one picture."""
    picture, ((axis,),) = new_figure(height=4.4)
    for number, each in enumerate(curves):
        style = line_style(number)
        axis.plot(each.x, each.raw, color=style["color"], alpha=0.3, linewidth=0.8)
        axis.plot(
            each.x, each.smooth, label=f"{each.name}: {each.last:.3f} at the end", linewidth=1.8, **style
        )
        if len(each.validation[0]):
            axis.plot(*each.validation, "o", markersize=5, color=style["color"], markeredgecolor="white")
    unit = curves[0].unit
    axis.set(xlabel="training step" if unit == "steps" else "training tokens", ylabel="loss (nats a token)")
    if unit == "tokens":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_title(f"Training loss over {unit}: raw, and smoothed", fontsize=11)
    with_grid(axis)
    legend_below(picture, axis)
    return picture


def draw(folders: list[Path], *, unit: str = "steps", window: int | None = None):
    """The picture of the runs in `folders`. Raises ValueError for a folder without a run."""
    if window is not None and window < 1:
        raise ValueError(f"--window {window} must be at least 1 value")
    runs, names = [read_run(folder) for folder in folders], names_of(folders)
    pairs = zip(runs, names, strict=True)
    return figure([curve(run, name, unit=unit, window=window) for run, name in pairs])


def main() -> None:
    parser = output_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders with TensorBoard events")
    parser.add_argument("--by", choices=UNITS, default="steps", help="what x counts")
    parser.add_argument("--window", type=int, help="values of a mean (a twentieth of the run)")
    run_picture(parser, lambda args: draw(args.runs, unit=args.by, window=args.window))


if __name__ == "__main__":
    main()
