"""Put finished parts together: their ids in order, the index, the manifest."""

import hashlib
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy

from tools.data.files import DataError, naming, sha256_file, write_atomic
from tools.data.indexed import id_type, pack, write_index
from tools.data.text_tokenizers import load_tokenizer
from tools.data.units import Settings, read_record

PACKAGES = ("numpy", "tokenizers", "tiktoken", "sentencepiece", "zstandard", "pyarrow")


class Assembler:
    """Appends finished parts in order to data.bin; deletes a part's ids when data.bin safely holds them."""

    def __init__(self, folder: Path, units: int) -> None:
        """Find how far an earlier run came; cut off what it may have appended without deleting the part."""
        self.folder, self.units = folder, units
        for leftover in folder.glob(".*"):
            leftover.unlink()
        self.finished = {number for number in range(units) if self.part(number, ".npz").exists()}
        self.appended, size = 0, 0
        while self.appended in self.finished and not self.part(self.appended, ".bin").exists():
            size += read_record(self.part(self.appended, ".npz"))[2]["bytes"]
            self.appended += 1
        self.path = folder / "data.bin"
        with naming("write", self.path):
            self._stream = open(self.path, "ab")  # noqa: SIM115 (open as long as the run)
            if os.path.getsize(self.path) < size:
                raise DataError(
                    f"{self.path} is shorter than the parts it took in; remove {folder} to start anew"
                )
            self._stream.truncate(size)

    def part(self, number: int, end: str) -> Path:
        """The path of a file of part `number`."""
        return self.folder / f"{number}{end}"

    def advance(self) -> int:
        """Append all parts that are next in order; returns the tokens appended. Raises DataError."""
        tokens = 0
        while self.appended in self.finished:
            ids = self.part(self.appended, ".bin")
            record = read_record(self.part(self.appended, ".npz"))[2]
            tokens += record["counts"]["tokens"]
            with naming("write", self.path), open(ids, "rb") as stream:
                if os.fstat(stream.fileno()).st_size != record["bytes"]:
                    raise DataError(f"{ids} is damaged; remove {self.folder} to start anew")
                shutil.copyfileobj(stream, self._stream, 1 << 20)
                self._stream.flush()
                os.fsync(self._stream.fileno())
                ids.unlink()
            self.appended += 1
        return tokens

    def close(self) -> None:
        """Close data.bin."""
        with naming("write", self.path):
            self._stream.close()


def finish(settings: Settings, plan: dict, assembler: Assembler) -> None:
    """Write data.idx and, last, data.json from the records of all parts. Raises DataError without parts."""
    parts = [read_record(assembler.part(number, ".npz")) for number in range(assembler.units)]
    lengths = numpy.concatenate([part[0] for part in parts])
    groups = numpy.concatenate([part[1] for part in parts])
    domains: dict[str, Counter] = {}
    for _, _, record in parts:
        domains.setdefault(record["domain"], Counter()).update(record["counts"])
    dropped = 0
    if settings.mode == "pack":
        lengths, groups, dropped = pack(lengths, settings.seq_length)
    if not len(lengths):
        shutil.rmtree(settings.folder)  # no use to a run with another length
        reason = (
            "no document has text"
            if settings.mode == "whole"
            else f"no sample fills --seq-length {settings.seq_length}"
        )
        raise DataError(f"{settings.output}: nothing to write, {reason}")
    target = load_tokenizer(settings.target_tokenizer)
    dtype = id_type(target.vocabulary)
    assembler.close()
    write_index(settings.folder / "data.idx", dtype, lengths, groups)
    # What packing dropped is still in data.bin: cut now, it would not match the parts after a kill.
    sizes = {
        ".bin": int(lengths.sum()) * dtype.itemsize,
        ".idx": os.path.getsize(settings.folder / "data.idx"),
    }
    manifest = {
        **{key: plan[key] for key in ("tool", "format", "settings", "tokenizers")},
        "plan_sha256": fingerprint(plan),
        "tokens": int(lengths.sum()),
        "sequences": len(lengths),
        "samples": len(groups),
        "dropped_at_end_tokens": dropped,
        "end_of_document": target.end_of_document,
        "vocabulary": target.vocabulary,
        "dtype": dtype.name,
        "domains": domains,
        "sources": [source for _, _, record in parts for source in record["sources"]],
        "bytes": sizes,
        "sha256": {end: sha256_file(settings.folder / f"data{end}", size) for end, size in sizes.items()},
        "versions": {"python": platform.python_version(), **installed(PACKAGES)},
    }
    write_atomic(settings.folder / "data.json", json.dumps(manifest, indent=1).encode() + b"\n")


def installed(packages: Sequence[str]) -> dict[str, str]:
    """The versions of those of `packages` that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(plan: dict) -> str:
    """The SHA-256 of a plan, whatever the paths of the tokenizers."""
    hashes = {role: entry["sha256"] for role, entry in plan["tokenizers"].items()}
    return hashlib.sha256(json.dumps({**plan, "tokenizers": hashes}, sort_keys=True).encode()).hexdigest()
