"""The engine of the converters: units of input in, one indexed dataset out, in parallel and restartable.

Workers turn units into parts in PREFIX.partial/ (see units.py). This process appends the parts in order to
data.bin, deletes each part's ids when they are safely there, and publishes by renaming at the end. A run
that was killed finds what is finished by these files alone, so its result is that of an unbroken run.
"""

import json
import multiprocessing
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tools.data.assembly import Assembler, fingerprint, finish
from tools.data.files import DataError, naming, only_writer, read_json, sha256_file, write_atomic
from tools.data.progress import Progress
from tools.data.text_tokenizers import load_tokenizer, tokenizer_file
from tools.data.units import Settings, Unit, Worker, convert_in_worker, start_worker

FORMAT = 1
ENDS = (".bin", ".idx", ".json")


def convert(settings: Settings, units: Sequence[Unit], workers: int, options: dict) -> dict:
    """Convert `units` into settings.output.bin/.idx/.json, or finish what a killed run began.

    `options` are the tool's own settings, for the manifest and to tell runs apart. Returns the manifest.
    """
    plan, begun = make_plan(settings, units, options), settings.folder.exists()
    if published(settings, plan):
        sys.stderr.write(f"{settings.output}.bin is there already, from the same input and settings\n")
        shutil.rmtree(settings.folder, ignore_errors=True)
        return read_json(f"{settings.output}.json")
    if not (begun and (settings.folder / "data.json").exists()):
        refuse_overwriting(settings)
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
        publish(settings)
        shutil.rmtree(settings.folder, ignore_errors=True)
    return read_json(f"{settings.output}.json")


def publish(settings: Settings) -> None:
    """Rename the finished files, data.json last: while it is there, a killed run has only this to repeat."""
    size = read_json(settings.folder / "data.json")["bytes"][".bin"]
    for end in ENDS:
        path = settings.folder / f"data{end}"
        if path.exists():
            with naming("write", f"{settings.output}{end}"):
                if end == ".bin":
                    os.truncate(path, size)
                os.replace(path, f"{settings.output}{end}")


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


def published(settings: Settings, plan: dict) -> bool:
    """Whether the output is there, complete and from this plan."""
    try:
        manifest = read_json(f"{settings.output}.json")
        sizes = {end: os.path.getsize(settings.output + end) for end in (".bin", ".idx")}
        return manifest["plan_sha256"] == fingerprint(plan) and manifest["bytes"] == sizes
    except (DataError, OSError, KeyError, TypeError):
        return False


def refuse_overwriting(settings: Settings) -> None:
    """Raise DataError when a file of the output's name is there."""
    for end in ENDS:
        if os.path.exists(settings.output + end):
            raise DataError(
                f"{settings.output}{end} exists and was not written from this input with these settings; "
                "remove it or choose another --output"
            )


def check_plan(folder: Path, plan: dict) -> None:
    """Note `plan` in the folder of a new run, or compare it with that of a killed one. Raises DataError."""
    path = folder / "plan.json"
    if not path.exists():
        write_atomic(path, json.dumps(plan).encode())
        return
    before = read_json(path)
    if fingerprint(plan) != fingerprint(before):
        changed = ", ".join(key for key in plan if plan[key] != before[key])
        raise DataError(f"{folder} is unfinished work with other {changed}; remove it to start anew")


def run_units(settings: Settings, units: Sequence[Unit], workers: int, assembler: Assembler) -> None:
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
    """Convert the numbered units in `workers` processes (1: in this one), yielding them in order."""
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
