"""Measure a core: tokens a second of the converters' worker against transformers on the same text.

    python tools/data/measure_conversion.py --input t.jsonl --reference Qwen/ --target-tokenizer qwen.tiktoken

Prints the median of several rounds, in millions of tokens a second of processor time; one thread each. The
worker also reads JSON, checks that the ids keep the text, and writes the ids to the disk; transformers only
tokenises.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.data.files import run_tool
from tools.data.text_units import LinesUnit
from tools.data.units import Settings, Worker, read_record

LIMIT = 8 << 20  # bytes of the input
BATCH = 64  # texts a call of transformers; one by one it is slower


def theirs(folder: str, texts: list[str]) -> Callable[[], int]:
    """A function that tokenises `texts` with transformers and returns the number of tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def tokenise() -> int:
        batches = (texts[begin : begin + BATCH] for begin in range(0, len(texts), BATCH))
        return sum(len(ids) for b in batches for ids in tokenizer(b, add_special_tokens=False)["input_ids"])

    return tokenise


def ours(tokenizer: str, unit: LinesUnit, folder: str) -> Callable[[], int]:
    """A function that converts `unit` and returns the number of tokens."""
    settings = Settings("measure", f"{folder}/m", tokenizer, None, None, "whole")
    settings.folder.mkdir(exist_ok=True)
    worker = Worker(settings)

    def convert() -> int:
        worker.convert(0, unit)
        return read_record(settings.folder / "0.npz")[2]["counts"]["tokens"]

    return convert


def main() -> None:
    """Run all in turn, round after round, so that a change of load meets all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", required=True, type=Path, help="a JSON Lines file; its first 8 MiB are used"
    )
    parser.add_argument("--reference", required=True, help="Hugging Face folder, for transformers and for us")
    parser.add_argument("--target-tokenizer", nargs="*", default=[], help="more tokenizers for us")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    unit = LinesUnit("text", args.input, 0, min(LIMIT, args.input.stat().st_size), "text")
    texts = [piece.text for ((piece,),) in unit.samples(None, Counter())]
    with tempfile.TemporaryDirectory() as folder:
        runs = {f"transformers, {args.reference}": theirs(args.reference, texts)}
        for name in [args.reference, *args.target_tokenizer]:
            runs[f"converter, {name}"] = ours(name, unit, folder)
        rates = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, function in runs.items():
                begin = time.process_time()
                tokens = function()
                rates[name].append(tokens / (time.process_time() - begin) / 1e6)
    for name, values in rates.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        sys.stdout.write(f"{statistics.median(values):6.2f} ({spread}) million tokens/s a core  {name}\n")


if __name__ == "__main__":
    run_tool("measure_conversion", main)
