"""Draw recall and density of every layer and head, of a run or of a trained model on a text.

    python -m tools.plot.heads --run runs/minfer --out heads.png
    python -m tools.plot.heads --checkpoint runs/trained --data-path data/mine --out heads.png

A run's are those of its last logged step, where recall is the share of the probability of the last queries
(megatron_mtrain/samples.py). A model's are measured on a text, over all queries: see tools.plot.mask.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy
from matplotlib.ticker import PercentFormatter

from tools.plot.figures import new_figure, output_parser, run_picture, share_range
from tools.plot.mask import add_model_arguments, attention_of, title_of
from tools.plot.model_heads import Head, examine, tokens_of
from tools.plot.runs import Run, read_run

# quantity -> what a cell is
QUANTITIES = {"recall": "kept share of the probability", "density": "attended share of causal pairs"}


@dataclass(frozen=True)
class Table:
    """Values by layer and head: quantity -> float64 [layers, heads], and what the picture's title says."""

    title: str
    values: dict[str, numpy.ndarray]


def of_run(run: Run) -> Table:
    """The last logged step of a run. Raises NoData when the run logged no heads."""
    found = {}
    for name in QUANTITIES:
        step, values = run.table(f"attention/by_head/{name}")
        if numpy.isfinite(values).any():
            found[name] = values
    return Table(f"Every layer and head at step {step}", found)


def of_heads(heads: list[Head], title: str) -> Table:
    """The heads that examine() found."""
    shape = (max(head.layer for head in heads) + 1, max(head.head for head in heads) + 1)
    values = {name: numpy.full(shape, numpy.nan) for name in QUANTITIES}
    for head in heads:
        values["recall"][head.layer, head.head] = head.recall
        values["density"][head.layer, head.head] = head.density
    return Table(title, values)


def figure(table: Table):
    """A heat map for each quantity, side by side."""
    layers, heads = next(iter(table.values.values())).shape
    wide = len(table.values)
    height = min(7.5, 1.6 + 0.2 * max(layers, 4))
    picture, axes = new_figure(1, wide, width=min(11.0, wide * (2.4 + 0.25 * max(heads, 6))), height=height)
    for axis, (name, values) in zip(axes[0], table.values.items(), strict=True):
        image = axis.imshow(values, cmap="viridis", aspect="auto", **share_range(values))
        axis.set(xlabel="query head", ylabel="layer")
        axis.set_xticks(range(0, heads, -(-heads // 16)))
        axis.set_yticks(range(0, layers, -(-layers // 18)))
        axis.set_title(
            f"{name.capitalize()}: mean {numpy.nanmean(values):.1%}, least {numpy.nanmin(values):.1%}",
            fontsize=10,
        )
        bar = picture.colorbar(image, ax=axis, pad=0.02, format=PercentFormatter(1.0))
        bar.set_label(QUANTITIES[name], fontsize=8)
    picture.suptitle(table.title, fontsize=11)
    return picture


def draw(args: Namespace):
    """The picture that the command line asks for."""
    if args.run is not None:
        return figure(of_run(read_run(args.run)))
    if args.checkpoint is None or args.data_path is None:
        raise ValueError("give --run, or --checkpoint and --data-path")
    tokens = tokens_of(args.data_path, args.seq_length, args.start)
    found, attention = examine(args.checkpoint, tokens, attention_of(args))
    return figure(of_heads(found, title_of(attention, args.checkpoint, tokens)))


def main() -> None:
    parser = output_parser(__doc__)
    parser.add_argument("--run", type=Path, help="folder with TensorBoard events")
    add_model_arguments(parser, required=False)
    run_picture(parser, draw)


if __name__ == "__main__":
    main()
