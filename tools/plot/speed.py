"""Draw speed, memory and balance over the steps of one or several runs.

    python -m tools.plot.speed runs/dense runs/minfer --out speed.png

A panel for each quantity that any of the runs logged (megatron_mtrain/telemetry.py).
"""

from functools import partial
from pathlib import Path

from matplotlib.ticker import EngFormatter, PercentFormatter

from tools.plot.figures import (
    NoData,
    legend_below,
    line_style,
    new_figure,
    output_parser,
    run_picture,
    with_grid,
)
from tools.plot.runs import Run, Series, names_of, read_run

# tag -> (title, unit)
QUANTITIES = {
    "step/tokens_per_second": ("Throughput", "tokens a second"),
    "step/ms": ("Step time", "ms"),
    "step/mfu": ("Model FLOPs utilisation", "share of the peak rate"),
    "step/peak_memory_gib": ("Peak memory of a GPU", "GiB"),
    "attention/index_ms/mean": ("Time of the index", "ms a layer"),
    "ring/worker_imbalance": ("Worker imbalance", "busiest rank / mean"),
    "ring/step_imbalance": ("Step imbalance", "busiest rank / mean"),
}
FORMATS = {
    "step/tokens_per_second": partial(EngFormatter, sep=""),
    "step/mfu": partial(PercentFormatter, 1.0, decimals=1),
}


def panels(runs: list[Run]) -> dict[str, list[Series | None]]:
    """The series of every run by tag, for tags that any of them logged. Raises NoData when there is none."""
    found = {tag: [run.series(tag) if run.has(tag) else None for run in runs] for tag in QUANTITIES}
    found = {tag: series for tag, series in found.items() if any(series)}
    if not found:
        names = ", ".join(str(run.folder) for run in runs)
        raise NoData(f"{names} logged no step/tokens_per_second; train without --no-log-attention")
    return found


def figure(found: dict[str, list[Series | None]], names: list[str]):
    """Small panels, two in a row, with one legend."""
    rows = -(-len(found) // 2)
    picture, axes = new_figure(rows, min(2, len(found)), width=9, height=0.6 + 2.2 * rows)
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    for axis, (tag, series) in zip(axes.flat, found.items(), strict=False):
        for number, (name, one) in enumerate(zip(names, series, strict=True)):
            if one is not None:
                axis.plot(one.steps, one.values, label=name, linewidth=1.2, **line_style(number))
        title, unit = QUANTITIES[tag]
        axis.set_title(title, fontsize=10)
        axis.set(ylabel=unit, xlabel="training step")
        if tag in FORMATS:
            axis.yaxis.set_major_formatter(FORMATS[tag]())
        with_grid(axis)
    picture.suptitle("Speed, memory and balance by training step", fontsize=11)
    if len(names) > 1:
        legend_below(picture, next(axis for axis in axes.flat if axis.lines))
    return picture


def draw(folders: list[Path]):
    """The picture of the runs in `folders`."""
    return figure(panels([read_run(folder) for folder in folders]), names_of(folders))


def main() -> None:
    parser = output_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders with TensorBoard events")
    run_picture(parser, lambda args: draw(args.runs))


if __name__ == "__main__":
    main()
