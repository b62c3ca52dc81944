"""Show what a Megatron indexed dataset holds: lengths, documents a sample, heads and tails, frequent tokens.

python tools/data/inspect_indexed.py data/prolong --tokenizer Qwen2.5/ --plot lengths.png --verify
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.data.files import DataError, naming, run_tool, sha256_file
from tools.data.indexed import Indexed, read_indexed
from tools.data.text_tokenizers import TextTokenizer, load_tokenizer

CHUNK = 1 << 24  # ids counted at a time, to keep memory flat
LARGEST = 1 << 22  # ids; counting takes eight bytes for each below the largest
BAR = 50  # characters of the longest bar


def describe(values: numpy.ndarray, what: str) -> str:
    """One line with the count, extremes, quartiles and mean of `values`."""
    marks = numpy.percentile(values, [0, 25, 50, 75, 100]).tolist()
    low, first, middle, third, high = (f"{mark:,.1f}".removesuffix(".0") for mark in marks)
    quartiles = f"quartiles {first} / {middle} / {third}"
    return f"{what}: {len(values):,}; min {low}, {quartiles}, max {high}, mean {values.mean():,.1f}"


def histogram(lengths: numpy.ndarray) -> Iterator[str]:
    """Bars of the number of sequences by powers of two of their length in tokens."""
    powers = numpy.bincount(numpy.log2(numpy.maximum(lengths, 1)).astype(int))
    for power in range(int(numpy.flatnonzero(powers)[0]), len(powers)):
        bar = "#" * -(-BAR * int(powers[power]) // int(powers.max()))
        yield f"  {1 << power:>11,} - {(2 << power) - 1:<11,} {powers[power]:>9,} {bar}"


def count_tokens(data: Indexed) -> numpy.ndarray:
    """How often each id occurs. Raises DataError for an id that no tokenizer has."""
    counts = numpy.zeros(0, numpy.int64)
    for begin in range(0, len(data.ids), CHUNK):
        chunk = data.ids[begin : begin + CHUNK]
        if chunk.min() < 0:
            raise DataError(
                f"token {begin + int(chunk.argmin())} has the negative id {chunk.min()}; damaged .bin"
            )
        if chunk.max() >= LARGEST:
            raise DataError(
                f"token {begin + int(chunk.argmax())} has the id {chunk.max()}, more than any vocabulary; "
                "damaged .bin"
            )
        found = numpy.bincount(chunk, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def token_lines(counts: numpy.ndarray, tokenizer: TextTokenizer | None, top: int) -> Iterator[str]:
    """The most frequent ids, with their text. Raises DataError for ids that the tokenizer does not have."""
    used = int((counts > 0).sum())
    yield f"tokens: {counts.sum():,} of {used:,} different ids, the largest {len(counts) - 1:,}"
    if tokenizer and len(counts) > tokenizer.vocabulary:
        raise DataError(
            f"id {len(counts) - 1} is not below the tokenizer's {tokenizer.vocabulary}: another tokenizer?"
        )
    for token in numpy.argsort(-counts, kind="stable")[: min(top, used)]:
        share = counts[token] / counts.sum()
        yield f"  {token:>8} {counts[token]:>12,} {share:7.2%}  {show([token], tokenizer)}"


def show(ids: list[int] | numpy.ndarray, tokenizer: TextTokenizer | None) -> str:
    """Ids as quoted text with special ids as <id>, or as numbers without a tokenizer."""
    ids = numpy.asarray(ids, dtype=numpy.int64)
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    text, begin = "", 0
    for position in [*numpy.flatnonzero(numpy.isin(ids, tokenizer.special_ids)).tolist(), len(ids)]:
        text += tokenizer.decode(ids[begin:position]) if position > begin else ""
        text += f"<{ids[position]}>" if position < len(ids) else ""
        begin = position + 1
    return repr(text)


def sample_lines(data: Indexed, tokenizer: TextTokenizer | None, samples: int, tokens: int) -> Iterator[str]:
    """Heads and tails of `samples` sequences spread over the dataset, `tokens` ids each."""
    for number in numpy.unique(numpy.linspace(0, len(data.lengths) - 1, samples).astype(int)).tolist():
        ids = data.sequence(number)
        yield f"sequence {number}, {len(ids):,} tokens"
        yield f"  head {show(ids[:tokens], tokenizer)}"
        yield f"  tail {show(ids[-tokens:], tokenizer)}"


def plot_lengths(lengths: numpy.ndarray, path: Path) -> None:
    """Draw the share of sequences and of tokens by sequence length. Raises DataError."""
    try:
        import matplotlib
    except ImportError:
        raise DataError("--plot needs the package matplotlib; pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    bins = numpy.geomspace(max(lengths.min(), 1), lengths.max() + 1, 41)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for weights, label in ((numpy.ones(len(lengths)), "sequences"), (lengths, "tokens")):
        axes.hist(lengths, bins, weights=weights / weights.sum(), histtype="step", label=f"share of {label}")
    axes.set(xscale="log", xlabel="sequence length (tokens)", ylabel="share")
    axes.legend()
    with naming("write", path):
        try:
            figure.savefig(path)
        except ValueError as error:
            raise DataError(f"--plot {path}: {error}") from None
    pyplot.close(figure)


def verify(prefix: Path) -> str:
    """Compare the files with their manifest. Raises DataError when they differ or there is none."""
    path = Path(f"{prefix}.json")
    with naming("read", path):
        manifest = json.loads(path.read_text())
    for end, expected in manifest.get("sha256", {}).items():
        if sha256_file(Path(f"{prefix}{end}")) != expected:
            raise DataError(f"{prefix}{end}: sha256 is not that of {path}; the file changed, write it again")
    return f"{prefix}.bin and .idx are those of {path}"


def main() -> None:
    """Read the dataset and print its description."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", type=Path, help="path of the dataset, without .bin")
    parser.add_argument("--tokenizer", metavar="PATH", help="show text instead of ids")
    parser.add_argument("--samples", type=int, default=3, help="sequences to show (%(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of a head or tail (%(default)s)")
    parser.add_argument("--top", type=int, default=20, help="frequent ids to list (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distribution of lengths")
    parser.add_argument("--verify", action="store_true", help="compare the files' hashes with the manifest")
    args = parser.parse_args()
    data = read_indexed(args.prefix)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    if not len(data.lengths):
        raise DataError(f"{args.prefix}.idx: the dataset is empty")
    lines = [describe(data.lengths, "sequences (documents or pieces), in tokens"), *histogram(data.lengths)]
    groups = numpy.diff(data.group_ends, prepend=0)
    lines += [describe(groups, "samples (groups of sequences), in documents")]
    lines += [describe(numpy.add.reduceat(data.lengths, data.group_ends - groups), "samples, in tokens")]
    if tokenizer:
        ended = int((data.ids[data.starts + data.lengths - 1] == tokenizer.end_of_document).sum())
        lines += [f"sequences with end of document ({tokenizer.end_of_document}) last: {ended:,}"]
    lines += [*token_lines(count_tokens(data), tokenizer, args.top)]
    lines += [*sample_lines(data, tokenizer, args.samples, args.tokens)]
    lines += [verify(args.prefix)] if args.verify else []
    sys.stdout.write("\n".join(lines) + "\n")
    if args.plot:
        plot_lengths(data.lengths, args.plot)


if __name__ == "__main__":
    run_tool("inspect_indexed", main)
