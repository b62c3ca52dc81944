"""Draw what every layer attended over training: density, recall, columns or slashes, as heat maps.

    python -m tools.plot.layers runs/minfer --quantity density recall --out layers.png

From a run with --tensorboard-dir that logged its attention (megatron_mtrain/telemetry.py). Layers go
downwards, training steps to the right; a quantity that the run did not log is an error.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy
from matplotlib.ticker import PercentFormatter

from tools.plot.figures import NoData, new_figure, output_parser, run_picture, share_range
from tools.plot.runs import Run, read_run

# quantity -> (what the picture shows, whether it is a share)
QUANTITIES = {
    "density": ("Density (attended share of causal pairs)", True),
    "recall": ("Recall (kept share of the probability)", True),
    "columns": ("Columns a head", False),
    "slashes": ("Slashes (block diagonals) a head", False),
}
MOST_CELLS = 400  # steps across; more are averaged


@dataclass(frozen=True)
class Layers:
    """One quantity of all layers: values float64 [layers, steps], NaN where nothing was logged."""

    quantity: str
    layers: list[int]
    steps: numpy.ndarray
    values: numpy.ndarray


def by_layer(run: Run, quantity: str) -> Layers:
    """A quantity of every layer and logged step. Raises NoData when the run did not log it."""
    found = run.numbered(rf"attention/{quantity}/layer_(\d+)")
    if not found:
        reason = (
            "only minfer has them"
            if quantity in ("columns", "slashes")
            else "train without --no-log-attention"
        )
        raise NoData(f"{run.folder} has no attention/{quantity}/layer_NN; {reason}")
    steps = numpy.unique(numpy.concatenate([series.steps for series in found.values()]))
    values = numpy.full((len(found), len(steps)), numpy.nan)
    for row, series in zip(values, found.values(), strict=True):
        row[numpy.searchsorted(steps, series.steps)] = series.values
    return Layers(quantity, [layer for (layer,) in found], steps, values)


def thinned(data: Layers, most: int = MOST_CELLS) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(edges of the cells in steps [n + 1], values [layers, n]), n at most `most`: means of neighbours."""
    groups = numpy.array_split(numpy.arange(len(data.steps)), min(most, len(data.steps)))
    firsts = data.steps[[group[0] for group in groups]].astype(float)
    gap = data.steps[-1] - data.steps[-2] if len(data.steps) > 1 else 1
    edges = numpy.append(firsts, data.steps[-1] + gap) - gap / 2
    masked = numpy.ma.masked_invalid(data.values)
    return edges, numpy.ma.stack([masked[:, group].mean(axis=1) for group in groups], axis=1).filled(
        numpy.nan
    )


def figure(panels: list[Layers]):
    """A heat map for every quantity, one below the other."""
    tall = max(len(data.layers) for data in panels)
    picture, axes = new_figure(len(panels), height=0.2 + len(panels) * (1.5 + min(tall, 60) * 0.045))
    for axis, data in zip(axes[:, 0], panels, strict=True):
        edges, cells = thinned(data)
        rows = numpy.arange(len(data.layers) + 1) - 0.5
        what, share = QUANTITIES[data.quantity]
        colours = share_range(data.values) if share else {}
        mesh = axis.pcolormesh(edges, rows, cells, cmap="viridis", **colours)
        axis.invert_yaxis()
        shown = range(0, len(data.layers), -(-len(data.layers) // 12))
        axis.set_yticks([*shown], [str(data.layers[row]) for row in shown])
        axis.set_facecolor("#dddddd")  # not logged
        ends = numpy.nanmin(data.values), numpy.nanmax(data.values)
        low, high = (f"{end:.1%}" if share else f"{end:.0f}" for end in ends)
        axis.set(ylabel="layer", title=f"{what} by layer and step: {low} to {high}")
        axis.title.set_fontsize(11)
        picture.colorbar(mesh, ax=axis, pad=0.01, format=PercentFormatter(1.0) if share else None)
    axes[-1, 0].set_xlabel("training step")
    return picture


def draw(run: Run, quantities: list[str]):
    """The picture of some quantities of a run."""
    return figure([by_layer(run, quantity) for quantity in quantities])


def main() -> None:
    parser = output_parser(__doc__)
    parser.add_argument("run", type=Path, help="folder with TensorBoard events")
    parser.add_argument("--quantity", nargs="+", choices=QUANTITIES, default=["density"])
    run_picture(parser, lambda args: draw(read_run(args.run), args.quantity))


if __name__ == "__main__":
    main()
