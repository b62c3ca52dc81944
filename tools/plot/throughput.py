"""Draw throughput by sequence length, of whole steps or of one layer, from the files of the benchmarks.

    python -m tools.plot.throughput tools/bench/results/2026-12-01-layer.csv --out throughput.png

Reads the JSON of tools/bench/bench_train.py and the CSV of tools/bench/bench_layer.py: several files make
one picture if they are of one kind. Rows that failed (out of memory) are named under the picture.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from tools.plot.figures import legend_below, line_style, new_figure, output_parser, run_picture, with_grid

KINDS = {"step": "whole training steps", "layer": "one attention layer, forward and backward"}


@dataclass(frozen=True)
class Point:
    """One measured row: tokens a second and, where a dense row of the same length is there, times dense."""

    kind: str
    method: str
    tokens: int
    tokens_per_second: float
    speedup: float | None
    density: float | None


@dataclass(frozen=True)
class Measured:
    """What the files of one kind hold: points, and (method, tokens, reason) of the rows that failed."""

    points: list[Point]
    failed: list[tuple[str, int, str]]

    def lines(self) -> dict[str, list[Point]]:
        """Points by method, in order of length; exact attention first."""
        methods = dict.fromkeys(
            sorted((p.method for p in self.points), key=lambda m: not m.startswith("dense"))
        )
        return {
            method: sorted((p for p in self.points if p.method == method), key=lambda p: p.tokens)
            for method in methods
        }


def read(paths: list[Path]) -> Measured:
    """The rows of all files. Raises ValueError for a file that is no benchmark's, or for two kinds."""
    points, failed = [], []
    for path in paths:
        for number, row in enumerate(_rows(path), 1):
            try:
                if "error" in row:
                    failed.append((row["method"], int(row["tokens"]), str(row["error"])))
                else:
                    points.append(_point(row))
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                raise ValueError(
                    f"{path}: row {number} is none of bench_train or bench_layer ({error!r}); give the JSON "
                    "or CSV that one of them wrote"
                ) from None
    if len({point.kind for point in points}) > 1:
        raise ValueError("rows of bench_train and of bench_layer do not fit into one picture; draw two")
    if not points:
        raise ValueError(f"no measured row in {', '.join(map(str, paths))}: all failed; measure again")
    return Measured(points, failed)


def _rows(path: Path) -> list[dict]:
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix == ".json" else [*csv.DictReader(text.splitlines())]
    except ValueError as error:
        raise ValueError(f"{path} is not readable ({error}); give a benchmark's JSON or CSV") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is no list of rows; give the JSON or CSV of bench_train or bench_layer")
    return rows


def _point(row: dict) -> Point:
    tokens = int(row["tokens"])
    kind = "step" if "tokens_per_s" in row else "layer"
    rate = float(row["tokens_per_s"]) if kind == "step" else tokens / float(row["total_ms"]) * 1e3
    others = (float(row[name]) if row.get(name) else None for name in ("speedup", "density"))
    return Point(kind, row["method"], tokens, rate, *others)


def figure(data: Measured):
    """Tokens a second, and the speed-up over exact attention where it is known, over sequence length."""
    compared = any(point.speedup and not point.method.startswith("dense") for point in data.points)
    picture, axes = new_figure(1, 1 + compared, width=9.5 if compared else 6, height=4.2)
    rate, gain = axes[0, 0], axes[0, -1]
    for number, (method, points) in enumerate(data.lines().items()):
        style = {**line_style(number), "marker": "o", "markersize": 4, "label": method}
        rate.plot([p.tokens for p in points], [p.tokens_per_second for p in points], **style)
        known = [p for p in points if p.speedup]
        if compared and known:
            gain.plot([p.tokens for p in known], [p.speedup for p in known], **style)
    rate.set_yscale("log")
    rate.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    rate.yaxis.set_major_formatter(EngFormatter(sep=""))
    rate.yaxis.set_minor_locator(NullLocator())
    rate.set(ylabel="tokens a second", title="Throughput by sequence length")
    if compared:
        gain.set(ylabel="times the dense rate", title="Speed-up over exact attention")
        gain.set_ylim(bottom=0)
    for axis in axes[0]:
        _length_axis(axis, sorted({point.tokens for point in data.points}))
        axis.title.set_fontsize(11)
        with_grid(axis)
    picture.suptitle(f"Measured: {KINDS[data.points[0].kind]}", fontsize=11)
    failed = "; ".join(f"{method} at {tokens}: {reason}" for method, tokens, reason in data.failed)
    if failed:
        picture.supxlabel(f"Did not run: {failed}", fontsize=8)
    legend_below(picture, rate)
    return picture


def _length_axis(axis, lengths: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short(int(tokens))))
    axis.set_xlabel("sequence length (tokens)")


def short(tokens: int) -> str:
    """131072 as 128K, 1048576 as 1M, others in full."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def main() -> None:
    parser = output_parser(__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="JSON of bench_train, or CSV of bench_layer")
    run_picture(parser, lambda args: figure(read(args.files)))


if __name__ == "__main__":
    main()
