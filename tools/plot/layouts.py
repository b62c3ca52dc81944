"""Draw which rank computes which part of causal attention, for every layout.

    python -m tools.plot.layouts --ranks 4 --blocks 16 --out layouts.png

A square is a query block (down) by a key block (across), in the colour of the rank that holds the query. The
number of squares of a rank is its work with exact attention; beside both layouts stand contiguous chunks, as
plain sequence parallelism would cut them.
"""

import numpy
from matplotlib.colors import ListedColormap

from megatron_mtrain.layouts import LAYOUTS, make_layout

from .figures import COLOURS, new_figure, output_parser, run_picture


def draw(ranks: int, blocks: int):
    """The figure. Raises ValueError when the blocks cannot be dealt to the ranks."""
    if ranks > len(COLOURS):
        raise ValueError(f"--ranks {ranks} has no colours; give at most {len(COLOURS)}")
    owners = {"contiguous (not used)": numpy.arange(blocks) * ranks // blocks}
    for name in LAYOUTS:
        layout = make_layout(name, blocks, ranks, 1)
        owners[name] = numpy.empty(blocks, dtype=int)
        for rank in range(ranks):
            owners[name][layout.blocks(rank)] = rank
    figure, axes = new_figure(1, len(owners), width=3.6 * len(owners), height=4.2)
    for axis, (name, owner) in zip(axes[0], owners.items(), strict=True):
        _squares(axis, owner, ranks)
        axis.set_title(name)
    axes[0, 0].set_ylabel("query block")
    return figure


def _squares(axis, owner, ranks: int) -> None:
    blocks = len(owner)
    causal = numpy.tril(numpy.ones((blocks, blocks), dtype=bool))
    work = numpy.bincount(owner, weights=causal.sum(1), minlength=ranks).astype(int)
    picture = numpy.ma.masked_array(numpy.broadcast_to(owner[:, None], causal.shape), ~causal)
    colours = ListedColormap(COLOURS[:ranks])
    axis.pcolormesh(picture, cmap=colours, vmin=-0.5, vmax=ranks - 0.5, edgecolors="white", linewidth=0.6)
    axis.invert_yaxis()
    axis.set_aspect("equal")
    ticks = range(0, blocks + 1, max(1, blocks // 8))
    axis.set(xticks=ticks, yticks=ticks)
    axis.set_xlabel("key block\nsquares of a rank: " + ", ".join(map(str, work)))


def main() -> None:
    """Command line."""
    parser = output_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=16, help="blocks of the whole sequence")
    run_picture(parser, lambda args: draw(args.ranks, args.blocks))


if __name__ == "__main__":
    main()
