"""Write a Megatron indexed dataset of text that every machine has: the sources of Python's standard library.

    python tools/data/make_demo_data.py --output data/demo

writes data/demo.bin and data/demo.idx (train with `--data-path data/demo`), data/demo.json (what they hold)
and data/demo_tokenizer/ (`--tokenizer-type HuggingFaceTokenizer --tokenizer-model data/demo_tokenizer`).
One token is one byte of UTF-8, so a loss is in nats a byte; one document is one source file, then
end-of-text.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.data.files import DataError
from tools.data.indexed import id_type, write_index

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256
VOCABULARY = 257
FORMAT = 1
# Tests and tables are absent on some machines or are not prose; packages differ from machine to machine.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "encodings", "pydoc_data", "site-packages", "dist-packages",
                   "__pycache__", "lib-dynload"}  # fmt: skip


def source_files(library: Path) -> list[Path]:
    """The library's .py files in a fixed order that mixes packages (by the hash of the relative path)."""
    found = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found, key=lambda p: hashlib.sha256(p.relative_to(library).as_posix().encode()).digest())


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE uses for each of the 256 byte values (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    symbol = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return [symbol[byte] for byte in range(256)]


def save_tokenizer(folder: Path) -> None:
    """Save a Hugging Face tokenizer whose id is the byte value, with END_OF_TEXT as id 256, into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_dataset(library: Path, prefix: Path, tokens: int) -> dict:
    """Write whole documents to `prefix`.bin/.idx until they hold `tokens` tokens; return counts and the hash.

    Raises ValueError when the library is too small.
    """
    digest, lengths, shown = hashlib.sha256(), [], 0
    dtype = id_type(VOCABULARY)
    with open(f"{prefix}.bin", "wb") as stream:
        for path in source_files(library):
            data = path.read_bytes()
            if not data or sum(lengths) >= tokens:
                continue
            ids = numpy.append(
                numpy.frombuffer(data, dtype=numpy.uint8).astype(dtype), dtype.type(END_OF_TEXT_ID)
            )
            stream.write(ids.tobytes())
            digest.update(data)
            lengths.append(len(ids))
            if 10 * sum(lengths) // tokens > shown:
                shown = min(10, 10 * sum(lengths) // tokens)
                sys.stderr.write(f"  {10 * shown:3d}%  {sum(lengths):,} tokens, {len(lengths)} documents\n")
    if sum(lengths) < tokens:
        raise ValueError(f"--tokens {tokens} is more than {library} holds; ask for {sum(lengths)} or fewer")
    write_index(Path(f"{prefix}.idx"), dtype, numpy.array(lengths), numpy.ones(len(lengths), numpy.int64))
    return {"documents": len(lengths), "tokens": sum(lengths), "text_sha256": digest.hexdigest()}


def is_current(output: Path, settings: dict) -> bool:
    """Whether `output` already holds a complete dataset written with the same settings."""
    try:
        manifest = json.loads(Path(f"{output}.json").read_text())
        sizes = {end: os.path.getsize(f"{output}{end}") for end in (".bin", ".idx")}
        complete = Path(f"{output}_tokenizer", "tokenizer_config.json").is_file()
        return complete and manifest["settings"] == settings and manifest["bytes"] == sizes
    except (OSError, ValueError, KeyError, TypeError):
        return False


def make_demo_data(output: Path, tokens: int) -> None:
    """Write the dataset, its tokenizer and its manifest, or leave them when they are current.

    Everything is built in a folder beside `output` and renamed at the end; the manifest goes away first and
    comes last, so that a killed run is never taken for a complete one. Raises ValueError and OSError.
    """
    settings = {"format": FORMAT, "tokens": tokens, "python": platform.python_version()}
    if is_current(output, settings):
        sys.stderr.write(f"{output}.bin is current\n")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        built = Path(scratch) / "data"
        save_tokenizer(Path(scratch) / "tokenizer")
        counts = write_dataset(Path(sysconfig.get_paths()["stdlib"]), built, tokens)
        sizes = {end: os.path.getsize(f"{built}{end}") for end in (".bin", ".idx")}
        manifest = {"settings": settings, **counts, "bytes": sizes, "vocabulary": VOCABULARY}
        built.with_suffix(".json").write_text(json.dumps(manifest, indent=2) + "\n")
        Path(f"{output}.json").unlink(missing_ok=True)
        shutil.rmtree(f"{output}_tokenizer", ignore_errors=True)
        os.replace(Path(scratch) / "tokenizer", f"{output}_tokenizer")
        for end in (".bin", ".idx", ".json"):
            os.replace(f"{built}{end}", f"{output}{end}")
    sys.stderr.write(f"{output}.bin: {counts['tokens']:,} tokens in {counts['documents']} documents\n")


def main() -> None:
    """Parse the command line and write the dataset."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="path of the dataset, without .bin")
    parser.add_argument("--tokens", type=int, default=2_500_000, help="tokens (bytes) to reach (%(default)s)")
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens} must be at least 1")
    try:
        make_demo_data(Path(args.output), args.tokens)
    except (DataError, OSError, ValueError) as error:
        sys.exit(f"make_demo_data: {error}")


if __name__ == "__main__":
    main()
