"""Turn ProLong's Llama-3 tokens (MosaicML MDS shards) into a Megatron dataset for another tokenizer.

    python tools/data/prolong_to_indexed.py --input long-context-524288 --domains book-524288@0.3,arxiv@0.7 \\
        --output data/prolong --seq-length 524288 --source-tokenizer Llama-3/ --target-tokenizer Qwen2.5/ \\
        --sample-interval 4 --workers 16

writes data/prolong.bin, .idx and .json (what they hold and where it came from); train with `--data-path
data/prolong`. The same command goes on where a killed run stopped. Documents stay whole and in order, a
sequence each, unless --pack or --exact asks for samples of exactly --seq-length tokens; then every sample
is a group of sequences in the index. With --pack a document is cut where a sample is full; with --exact a
source sample that is long enough is cut to the length, and a shorter one is dropped.
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.data.command_line import add_output_arguments, make_settings, report
from tools.data.conversion import convert
from tools.data.files import DataError, run_tool
from tools.data.prolong_samples import make_units, parse_domains


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", required=True, type=Path, metavar="DIR", help="folder of the domains' folders"
    )
    parser.add_argument(
        "--domains",
        default="",
        help="comma-separated folders of --input, all if not given; NAME@WEIGHT on each makes the numbers of "
        "samples proportional to the weights, without repeating any",
    )
    parser.add_argument(
        "--split", default="train", help="subfolder of each domain; ProLong has only train, itself"
    )
    parser.add_argument(
        "--sample-interval", type=int, default=1, metavar="K", help="take every K-th sample (1)"
    )
    parser.add_argument(
        "--source-tokenizer", required=True, metavar="PATH", help="tokenizer of the shards: Llama-3"
    )
    add_output_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Choose the samples, convert them, say what came out."""
    args = parse_arguments()
    if args.sample_interval < 1:
        raise DataError(f"--sample-interval {args.sample_interval} must be at least 1")
    settings = make_settings(args, "prolong_to_indexed")
    units = make_units(parse_domains(args.domains, args.input, args.split), args.input, args.sample_interval)
    options = {"domains": args.domains, "split": args.split, "sample_interval": args.sample_interval}
    report(convert(settings, units, args.workers, options), args.output)


if __name__ == "__main__":
    run_tool("prolong_to_indexed", main)
