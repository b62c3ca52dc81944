"""The part of the command line that the converters share: where to write, for which tokenizer, how."""

import argparse
import os
import sys

from tools.data.files import DataError
from tools.data.units import Settings


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --output, --target-tokenizer, --seq-length, --pack, --exact and --workers."""
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the dataset, without .bin")
    parser.add_argument(
        "--target-tokenizer",
        required=True,
        metavar="PATH",
        help="a Hugging Face folder, a sentencepiece model, or a tiktoken rank file of Llama-3 or Qwen",
    )
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="tokens of a sample, for --pack and --exact"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--pack", action="store_true", help="lay documents end to end and cut every N tokens")
    mode.add_argument("--exact", action="store_true", help="keep only samples of N tokens or more, cut to N")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=int, default=cores, help="processes; the output is the same for any (%(default)s)"
    )


def make_settings(args: argparse.Namespace, tool: str) -> Settings:
    """The engine's settings from parsed arguments. Raises DataError for values that do not fit together."""
    mode = "pack" if args.pack else "exact" if args.exact else "whole"
    if args.seq_length is not None and args.seq_length < 1:
        raise DataError(f"--seq-length {args.seq_length} must be at least 1 token")
    if mode != "whole" and args.seq_length is None:
        raise DataError(f"--{mode} needs --seq-length N, the tokens of a sample")
    if args.workers < 1:
        raise DataError(f"--workers {args.workers} must be at least 1")
    if not os.path.basename(args.output):
        raise DataError(f"--output {args.output}: give a file name without .bin, not a folder")
    source = getattr(args, "source_tokenizer", None)
    # The length matters to the output only where samples have one.
    seq_length = args.seq_length if mode != "whole" else None
    return Settings(tool, args.output, args.target_tokenizer, source, seq_length, mode)


def report(manifest: dict, output: str) -> None:
    """Print what a conversion wrote and dropped, and the argument to train with."""
    total = manifest["tokens"]
    for name, counts in manifest["domains"].items():
        kept = counts["tokens"]
        line = f"{name}: {counts['samples']:,} samples, {counts['documents']:,} documents, {kept:,} tokens"
        notes = [
            f"{counts[key]:,} {key.replace('_', ' ')}"
            for key in sorted(counts)
            if counts[key] and ("dropped" in key or "changed" in key or "outside" in key or "empty" in key)
        ]
        sys.stdout.write("; ".join([line, *notes]) + "\n")
    if manifest["settings"]["mode"] == "pack":
        sys.stdout.write(
            f"{manifest['dropped_at_end_tokens']:,} tokens at the end fill no sample and are dropped\n"
        )
    if manifest["settings"]["mode"] != "whole":
        length = manifest["settings"]["seq_length"]
        sys.stdout.write(f"{manifest['samples']:,} samples of exactly {length:,} tokens\n")
    sys.stdout.write(
        f"{total:,} tokens in {manifest['sequences']:,} sequences; train with --data-path {output}\n"
    )
