"""What all pictures share: size, colours that colour-blind readers tell apart, a file written whole."""

import io
import logging
import os
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tools.data.files import DataError, write_atomic

# Okabe and Ito's palette; yellow is left out, it is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")  # after the last colour, lines go on with the next style
WAITING = "#D55E00"
QUIET = {"color": "#cccccc", "linewidth": 0.6}
DPI = 110


class NoData(ValueError):
    """The run has nothing to draw this picture from; the text says why, and how to get it."""


def new_figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 4.0):
    """A figure of width x height inches and its axes as an array [rows, columns]."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def line_style(number: int) -> dict:
    """Colour and style of the n-th line of a picture; no two of 28 are alike."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number // len(COLOURS) % len(STYLES)],
    }


def with_grid(axis) -> None:
    """Light lines behind the data, and no frame above and to the right of it."""
    axis.grid(**QUIET)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def legend_below(figure, axis, *, columns: int = 4, order: tuple[str, ...] = ()) -> None:
    """The legend of `axis` under the picture, where it covers nothing; `order` of labels, if given."""
    handles, labels = axis.get_legend_handles_labels()
    if order:
        handles, labels = [handles[labels.index(label)] for label in order], order
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False
        )


def share_range(values) -> dict:
    """vmin and vmax for colours of shares, at least a hundredth apart: what is even shall look even."""
    low, high = float(numpy.nanmin(values)), float(numpy.nanmax(values))
    return {"vmin": min(low, high - 0.01), "vmax": high}


def png(figure) -> bytes:
    """The figure as the bytes of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()


def output_parser(description: str) -> ArgumentParser:
    """A command line with --out, the PNG file to write."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    return parser


def check_out(path: Path, ending: str) -> None:
    """Raises ValueError unless a file of this ending can be written at `path`: before any work."""
    if path.suffix.lower() != ending:
        raise ValueError(f"--out {path} must end in {ending}")
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--out {path}: the folder {path.parent} cannot be written")


def run_picture(parser: ArgumentParser, make: Callable) -> None:
    """Parses the command line, makes the figure with make(args) and writes it to --out.

    What the user can mend ends in one line and exit code 1, with nothing written.
    """
    args = parser.parse_args()

    def work():
        check_out(args.out, ".png")
        write_atomic(args.out, png(make(args)))

    run(work)


def run(work: Callable[[], None]) -> None:
    """Calls a tool's work; a user's errors end in one line and exit code 1 (interrupted: 130)."""
    name = Path(sys.argv[0]).stem
    logging.disable(logging.WARNING)  # of libraries, about GPUs and packages that are not there
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except (ValueError, OSError, DataError) as error:
        sys.exit(f"{name}: error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted; nothing was written\n")
        sys.exit(130)
    finally:
        logging.disable(logging.NOTSET)
