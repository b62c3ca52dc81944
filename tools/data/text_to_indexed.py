"""Turn JSON Lines, Parquet or plain text into a Megatron indexed dataset.

    python tools/data/text_to_indexed.py --input corpus/*.jsonl more.parquet --output data/mine \\
        --target-tokenizer Qwen2.5/ --workers 16

writes data/mine.bin, .idx and .json (what they hold and where it came from); train with `--data-path
data/mine`. A line, a row or a plain text file is a document, and gets an end-of-document token. The same
command goes on where a killed run stopped. --pack and --exact make samples of exactly --seq-length tokens,
see prolong_to_indexed.py.
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.data.command_line import add_output_arguments, make_settings, report
from tools.data.conversion import convert
from tools.data.files import run_tool
from tools.data.text_files import SUFFIXES, make_units


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, folders or patterns; each is a domain",
    )
    parser.add_argument(
        "--format", choices=sorted(SUFFIXES), help="form of the files; by their suffix if not given"
    )
    parser.add_argument("--text-key", default="text", help="key or column of the text (%(default)s)")
    add_output_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Find the files, convert them, say what came out."""
    args = parse_arguments()
    settings = make_settings(args, "text_to_indexed")
    units = make_units(args.input, args.format, args.text_key)
    options = {"input": args.input, "format": args.format, "text_key": args.text_key}
    report(convert(settings, units, args.workers, options), args.output)


if __name__ == "__main__":
    run_tool("text_to_indexed", main)
