"""The engine of the converters: units of input in, one indexed dataset out, in parallel and restartable.

Workers turn units into parts in PREFIX.partial/ (see units.py). This process appends the parts in order to
data.bin, deletes each part's ids when they are safely there, and publishes by renaming at the end. A run that was
killed finds what is finished by these files alone, so its result is that of an unbroken run.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy

from tools.data.files import DataError, naming, only_writer, sha256_file, write_atomic
from tools.data.indexed import id_type, pack, write_index
from tools.data.progress import Progress
from tools.data.text_tokenizers import load_tokenizer, tokenizer_file
from tools.data.units import Settings, Unit, Worker, convert_in_worker, read_record, start_worker

FORMAT = 1
ENDS = (".bin", ".idx", ".json")
PACKAGES = ("numpy", "tokenizers", "tiktoken", "sentencepiece", "zstandard", "pyarrow")


def convert(settings: Settings, units: Sequence[Unit], workers: int, options: dict) -> dict:
    """Convert `units` into settings.output.bin/.idx/.json, or go on where a killed run stopped; return the manifest.

    `options` are the tool's own settings, for the manifest and to tell runs apart. Raises DataError.
    """
    manifest = Path(f"{settings.output}.json")
    plan = make_plan(settings, units, options)
    if not settings.folder.exists() and already_there(settings, plan):
        sys.stderr.write(f"{settings.output}.bin is there already, from the same input and settings\n")
        return json.loads(manifest.read_text())
    for name in filter(None, (settings.source_tokenizer, settings.target_tokenizer)):
        load_tokenizer(name)  # a tokenizer that cannot be loaded is told before anything is written
    with naming("create", settings.folder):
        settings.folder.mkdir(parents=True, exist_ok=True)
    with only_writer(settings.folder):
        check_plan(settings.folder, plan)
        if not (settings.folder / "data.json").exists():
            assembler = Assembler(settings.folder, len(units))
            run_units(settings, units, workers, assembler)
            finish(settings, plan, assembler)
        for end in ENDS:
            if (settings.folder / f"data{end}").exists():
                with naming("write", f"{settings.output}{end}"):
                    os.replace(settings.folder / f"data{end}", f"{settings.output}{end}")
        shutil.rmtree(settings.folder, ignore_errors=True)
    return json.loads(manifest.read_text())


def make_plan(settings: Settings, units: Sequence[Unit], options: dict) -> dict:
    """All that the output depends on, as JSON."""
    names = {"target": settings.target_tokenizer, "source": settings.source_tokenizer}
    tokenizers = {
        role: {"path": name, "sha256": sha256_file(tokenizer_file(name))}
        for role, name in names.items()
        if name
    }
    plan = {
        "format": FORMAT,
        "tool": settings.tool,
        "settings": {"mode": settings.mode, "seq_length": settings.seq_length, **options},
        "tokenizers": tokenizers,
        "input": [unit.identity() for unit in units],
    }
    return json.loads(json.dumps(plan))


def fingerprint(plan: dict) -> str:
    """The SHA-256 of a plan, whatever the paths of the tokenizers."""
    hashes = {role: entry["sha256"] for role, entry in plan["tokenizers"].items()}
    return hashlib.sha256(json.dumps({**plan, "tokenizers": hashes}, sort_keys=True).encode()).hexdigest()


def already_there(settings: Settings, plan: dict) -> bool:
    """Whether the output exists and comes from this plan. Raises DataError when it comes from another one."""
    existing = [settings.output + end for end in ENDS if os.path.exists(settings.output + end)]
    if not existing:
        return False
    try:
        manifest = json.loads(Path(f"{settings.output}.json").read_text())
        sizes = {end: os.path.getsize(settings.output + end) for end in (".bin", ".idx")}
        if manifest["plan_sha256"] == fingerprint(plan) and manifest["bytes"] == sizes:
            return True
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(
        f"{existing[0]} exists and was not written from this input with these settings; "
        "remove it or choose another --output"
    )


def check_plan(folder: Path, plan: dict) -> None:
    """Note `plan` in the folder of a new run, or compare it with that of a killed one. Raises DataError."""
    path = folder / "plan.json"
    if not path.exists():
        write_atomic(path, json.dumps(plan).encode())
        return
    with naming("read", path):
        before = json.loads(path.read_text())
    if fingerprint(plan) != fingerprint(before):
        changed = ", ".join(key for key in plan if plan[key] != before[key])
        raise DataError(f"{folder} is unfinished work with other {changed}; remove it to start anew")


def run_units(settings: Settings, units: Sequence[Unit], workers: int, assembler: "Assembler") -> None:
    """Convert the units that are not finished and append all parts in order, with progress."""
    progress = Progress(sum(unit.size for unit in units))
    for number in assembler.finished:
        progress.skip(units[number].size)
    if assembler.finished:
        sys.stderr.write(f"{settings.folder}: {len(assembler.finished)} of {len(units)} units are finished\n")
    to_do = [(number, unit) for number, unit in enumerate(units) if number not in assembler.finished]
    for number in parts_in_order(settings, to_do, min(workers, len(to_do))):
        assembler.finished.add(number)
        progress.add(units[number].size, assembler.advance())
    assembler.advance()
    progress.show()


def parts_in_order(settings: Settings, to_do: list[tuple[int, Unit]], workers: int) -> Iterator[int]:
    """Convert the numbered units in `workers` processes (in this one when it is 1), yielding them in order."""
    if workers <= 1:
        worker = Worker(settings)
        for number, unit in to_do:
            worker.convert(number, unit)
            yield number
        return
    # spawn: forking a process that has run tokenizers' threads can deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker, (settings,))
    running = deque()
    try:
        for number, unit in to_do:
            running.append((number, pool.submit(convert_in_worker, number, unit)))
            if len(running) > 4 * workers:  # so that a slow unit does not let finished parts pile up
                yield wait_for(*running.popleft())
        while running:
            yield wait_for(*running.popleft())
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def wait_for(number, future) -> int:
    """The number of a submitted unit, when it is done; raises what its worker raised."""
    future.result()
    return number


class Assembler:
    """Appends finished parts in order to data.bin; a part's ids are deleted only when data.bin safely holds them."""

    def __init__(self, folder: Path, units: int) -> None:
        """Find how far an earlier run came, and cut off what it may have appended without deleting the part."""
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
            tokens += read_record(self.part(self.appended, ".npz"))[2]["counts"]["tokens"]
            with naming("write", self.path), open(ids, "rb") as stream:
                shutil.copyfileobj(stream, self._stream, 1 << 20)
                self._stream.flush()
                os.fsync(self._stream.fileno())
                ids.unlink()
            self.appended += 1
        return tokens

    def close(self, size: int) -> None:
        """Cut data.bin to `size` bytes and close it."""
        with naming("write", self.path):
            self._stream.truncate(size)
            os.fsync(self._stream.fileno())
            self._stream.close()


def finish(settings: Settings, plan: dict, assembler: Assembler) -> None:
    """Write data.idx and, last, data.json, from the records of all parts. Raises DataError when nothing is left."""
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
        raise DataError(
            f"{settings.output}: nothing to write, no sample fills --seq-length {settings.seq_length}"
        )
    target = load_tokenizer(settings.target_tokenizer)
    dtype = id_type(target.vocabulary)
    assembler.close(int(lengths.sum()) * dtype.itemsize)
    write_index(settings.folder / "data.idx", dtype, lengths, groups)
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
        "bytes": {end: os.path.getsize(settings.folder / f"data{end}") for end in (".bin", ".idx")},
        "sha256": {end: sha256_file(settings.folder / f"data{end}") for end in (".bin", ".idx")},
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
