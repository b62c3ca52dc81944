"""What a worker does: turn one unit of input into a part, n.bin (ids) and n.npz (lengths, counts, sources).

A *unit* is a part of the input that does not depend on the number of workers (a shard, a range of a file).
A part is complete when its .npz is there: it is written last, and both appear by renaming.
"""

import io
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy

from tools.data.files import naming, write_atomic
from tools.data.indexed import id_type
from tools.data.text_tokenizers import TextTokenizer, load_tokenizer


class Piece(NamedTuple):
    """Text of a document, and whether an end-of-document token follows it."""

    text: str
    ended: bool


class Unit(Protocol):
    """A part of the input; implementations are frozen dataclasses that can be pickled."""

    domain: str
    size: int  # bytes, for the progress only

    def identity(self) -> list:
        """What this unit reads, as JSON; a resumed run must find the same."""

    def samples(self, source: TextTokenizer | None, counts: Counter) -> Iterator[list[list[Piece]]]:
        """The samples: each a list of documents, each a list of pieces. Adds what it drops to `counts`."""

    def sources(self) -> list[dict]:
        """Path, bytes and sha256 of the files that this unit answers for; called after `samples` ended."""


@dataclass(frozen=True)
class Settings:
    """What the output depends on besides the units; `mode` is whole, pack or exact, seq_length in tokens."""

    tool: str
    output: str
    target_tokenizer: str
    source_tokenizer: str | None
    seq_length: int | None
    mode: str

    @property
    def folder(self) -> Path:
        """Where unfinished work lies."""
        return Path(f"{self.output}.partial")


class Worker:
    """The tokenizers, loaded once per process, and the conversion of one unit with them."""

    def __init__(self, settings: Settings) -> None:
        """Load the tokenizers. Raises DataError."""
        self.settings = settings
        self.source = load_tokenizer(settings.source_tokenizer) if settings.source_tokenizer else None
        self.target = load_tokenizer(settings.target_tokenizer)

    def convert(self, number: int, unit: Unit) -> None:
        """Write part `number` from `unit`. Raises DataError for damaged input or a failed write."""
        path = self.settings.folder / f"{number}.bin"
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        exact = self.settings.mode == "exact"
        counts, lengths, groups = Counter(), [], []
        dtype = id_type(self.target.vocabulary)
        try:
            with naming("write", path), open(scratch, "wb") as stream:
                for sample in unit.samples(self.source, counts):
                    documents = encode(sample, self.target, counts)
                    if exact:
                        documents = take_exactly(documents, self.settings.seq_length, counts)
                    for ids in documents:
                        stream.write(ids.astype(dtype).tobytes())
                    lengths += map(len, documents)
                    groups += [len(documents)] * bool(documents) if exact else [1] * len(documents)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
        counts["tokens"] = sum(lengths)
        record = {
            "domain": unit.domain,
            "counts": counts,
            "sources": unit.sources(),
            "bytes": dtype.itemsize * sum(lengths),
        }
        write_record(path.with_suffix(".npz"), lengths, groups, record)


def encode(sample: list[list[Piece]], target: TextTokenizer, counts: Counter) -> list[numpy.ndarray]:
    """The ids of each document of a sample that has text; counts pieces that the tokenizer's rules change."""
    documents = []
    for pieces in sample:
        ids = []
        for piece in pieces:
            encoded = target.encode(piece.text)
            counts["characters"] += len(piece.text)
            counts["pieces_changed_by_tokenizer"] += not target.keeps(piece.text, encoded)
            ids += [encoded, [target.end_of_document]] if piece.ended else [encoded]
        if any(piece.text for piece in pieces):
            documents.append(numpy.concatenate(ids).astype(numpy.int32))
        else:
            counts["empty_documents"] += 1
    counts["samples"] += 1
    counts["documents"] += len(documents)
    return documents


def take_exactly(documents: list[numpy.ndarray], seq_length: int, counts: Counter) -> list[numpy.ndarray]:
    """The first `seq_length` tokens of a sample, or nothing when it is shorter; counts what is dropped."""
    total, kept, room = sum(map(len, documents)), [], seq_length
    if total < seq_length:
        counts["dropped_samples"] += 1
        counts["dropped_tokens"] += total
        return []
    for ids in documents:
        if room:
            kept.append(ids[:room])
            room -= len(kept[-1])
    counts["dropped_tokens"] += total - seq_length
    return kept


def write_record(path: Path, lengths: list[int], groups: list[int], record: dict) -> None:
    """Write a part's .npz: lengths in tokens, documents a sample, `record` as JSON. Raises DataError."""
    data = io.BytesIO()
    arrays = {"lengths": numpy.array(lengths, numpy.int64), "groups": numpy.array(groups, numpy.int64)}
    numpy.savez(data, **arrays, record=numpy.array(json.dumps(record)))
    write_atomic(path, data.getvalue())


def read_record(path: Path) -> tuple[numpy.ndarray, numpy.ndarray, dict]:
    """The lengths, groups and record that `write_record` wrote. Raises DataError."""
    with naming("read", path), numpy.load(path) as part:
        return part["lengths"], part["groups"], json.loads(str(part["record"]))


_worker: Worker


def start_worker(settings: Settings) -> None:
    """Make this process a worker. It ends with its parent, which may be killed without a chance to say so."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _worker = Worker(settings)


def convert_in_worker(number: int, unit: Unit) -> None:
    """`Worker.convert` of the worker that `start_worker` made."""
    _worker.convert(number, unit)
