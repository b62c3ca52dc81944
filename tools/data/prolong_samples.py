"""ProLong's folders as units: which domains, which samples of them, and the documents inside a sample.

A domain is a folder of MDS shards of source token ids; `indices` says where documents begin and end in a
sample.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy

from tools.data.files import DataError
from tools.data.mds import Shard, ShardReader, read_index
from tools.data.text_tokenizers import TextTokenizer
from tools.data.units import Piece


@dataclass(frozen=True)
class Domain:
    """A folder of shards and its share of the samples, relative to the others' shares; None: all of it."""

    name: str
    folder: Path
    weight: Fraction | None


def parse_domains(text: str, root: Path, split: str) -> list[Domain]:
    """The domains of "a,b" or "a@0.25,b@0.75" below `root`; an empty text means every domain there is.

    Raises DataError for a folder that is missing, a name given twice, a weight that is no positive number, or
    weights on only some domains.
    """
    if not root.is_dir():
        raise DataError(f"--input {root}: no such folder")
    present = sorted(path.parent.name for path in root.glob("*/index.json"))
    entries = [entry.strip() for entry in re.split(r"[,\s]+", text) if entry.strip()] or present
    domains = []
    for entry in entries:
        name, at, weight = entry.partition("@")
        try:
            share = Fraction(weight) if at else None
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if share is not None and share <= 0:
            raise DataError(f"--domains {entry}: the weight must be a number above 0, as in {name}@0.05")
        if not name or not (root / name).is_dir():
            raise DataError(
                f"--domains {entry}: no folder {root / name}; there are: {', '.join(present) or 'none'}"
            )
        domains.append(Domain(name, split_folder(root / name, split), share))
    names = [domain.name for domain in domains]
    if len(set(names)) < len(names):
        raise DataError(f"--domains {text}: a domain is given twice; add up its weights")
    if len({domain.weight is None for domain in domains}) > 1:
        raise DataError(f"--domains {text}: give every domain a weight or none")
    if not domains:
        raise DataError(f"--input {root}: no domain there (a folder with index.json)")
    return domains


def split_folder(folder: Path, split: str) -> Path:
    """The folder of a split: a subfolder of that name; the domain itself for "train", as in ProLong."""
    if (folder / split / "index.json").is_file():
        return folder / split
    if split == "train":
        return folder
    raise DataError(f"--split {split}: no {folder / split / 'index.json'}; ProLong has only train")


def take_evenly(count: int, share: Fraction) -> list[int]:
    """Of `count` things, those that a share in (0, 1] takes, spread evenly: 8 at 1/4 gives [3, 7]."""
    return [
        number for number in range(count) if math.floor((number + 1) * share) > math.floor(number * share)
    ]


@dataclass(frozen=True)
class ShardUnit:
    """The chosen samples of one shard."""

    domain: str
    root: Path
    shard: Shard
    samples_taken: tuple[int, ...]
    _sources: list = field(default_factory=list, compare=False)

    @property
    def size(self) -> int:
        """Bytes of the chosen samples, about."""
        return self.shard.raw.size * len(self.samples_taken) // max(self.shard.samples, 1)

    def identity(self) -> list:
        """The shard's file, its size in bytes and the samples. Raises DataError when the file is missing."""
        path = self.shard.path
        if not path.is_file():
            raise DataError(f"{path}: missing shard, {path.parent} is not complete; download it again")
        return [path.relative_to(self.root).as_posix(), path.stat().st_mtime_ns, path.stat().st_size,
                list(self.samples_taken)]  # fmt: skip

    def samples(self, source: TextTokenizer, counts: Counter) -> Iterator[list[list[Piece]]]:
        """The documents of each chosen sample. Raises DataError for a damaged shard."""
        reader = ShardReader(self.shard)
        for number in self.samples_taken:
            columns = reader.sample(number, ("input_ids", "indices"))
            where = f"{self.shard.path}: sample {number}"
            ids = check_ids(columns.get("input_ids"), source, where)
            counts["source_tokens"] += len(ids)
            bounds = check_bounds(columns.get("indices"), len(ids), where)
            counts["source_tokens_outside_documents"] += len(ids) - sum(end - begin for begin, end in bounds)
            yield [split_document(ids[begin:end], source, counts) for begin, end in bounds]
        path = self.shard.path
        entry = {"path": path.relative_to(self.root).as_posix(), "bytes": self.shard.file.size}
        self._sources.append({**entry, "sha256": reader.sha256, "samples": len(self.samples_taken)})

    def sources(self) -> list[dict]:
        """The shard's file and its sha256."""
        return self._sources


def check_ids(ids: object, source: TextTokenizer, where: str) -> numpy.ndarray:
    """`ids` when it is a row of token ids of the source tokenizer. Raises DataError."""
    if not isinstance(ids, numpy.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        found = "is missing" if ids is None else f"is {describe(ids)}"
        raise DataError(f"{where}: column input_ids {found}; it must be a one-dimensional array of integers")
    if len(ids) and (ids.min() < 0 or ids.max() >= source.vocabulary):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise DataError(
            f"{where}: token id {wrong} is not below the source tokenizer's {source.vocabulary}; the "
            "shard is damaged (download it again) or --source-tokenizer is not the one it was written with"
        )
    return ids


def check_bounds(bounds: object, tokens: int, where: str) -> list[tuple[int, int]]:
    """Start and end of each document, in tokens; the whole sample without the column. Raises DataError."""
    if bounds is None:
        return [(0, tokens)]
    if not isinstance(bounds, numpy.ndarray) or bounds.dtype.kind not in "iu" or bounds.shape[1:] != (2,):
        raise DataError(
            f"{where}: column indices is {describe(bounds)}; it must be an integer array [documents, 2]"
        )
    flat = bounds.astype(numpy.int64).ravel()
    if len(flat) and (flat[0] < 0 or flat[-1] > tokens or (numpy.diff(flat) < 0).any()):
        raise DataError(
            f"{where}: document bounds do not ascend within its {tokens} tokens; download the shard again"
        )
    return [
        (begin, end)
        for begin, end in zip(flat[::2].tolist(), flat[1::2].tolist(), strict=True)
        if end > begin
    ]


def describe(value: object) -> str:
    """The form of a column's value, for messages."""
    return (
        f"an array {list(value.shape)} of {value.dtype}"
        if isinstance(value, numpy.ndarray)
        else type(value).__name__
    )


def split_document(ids: numpy.ndarray, source: TextTokenizer, counts: Counter) -> list[Piece]:
    """The text between special ids, as pieces.

    An id that ends documents ends a piece, one that begins them goes without a trace, any other has no
    counterpart in the target vocabulary and is counted as dropped.
    """
    pieces, begin = [], 0
    for position in [*numpy.flatnonzero(numpy.isin(ids, source.special_ids)).tolist(), len(ids)]:
        special = int(ids[position]) if position < len(ids) else None
        ended = special in source.end_ids
        if position > begin or ended:
            pieces.append(Piece(source.decode(ids[begin:position]) if position > begin else "", ended))
        if special is not None and not ended and special not in source.begin_ids:
            counts["special_tokens_dropped"] += 1
        begin = position + 1
    return pieces


def make_units(domains: list[Domain], root: Path, interval: int) -> list[ShardUnit]:
    """Every `interval`-th sample of each domain, then as many of them as the weights leave, by shard.

    The domain that is smallest for its weight is taken whole and nothing is repeated. Raises DataError.
    """
    places = []
    for domain in domains:
        shards = read_index(domain.folder)
        every = [(shard, number) for shard in shards for number in range(shard.samples)]
        places.append(every[::interval])
    if domains[0].weight is not None:
        scale = min(len(chosen) / domain.weight for chosen, domain in zip(places, domains, strict=True))
        for chosen, domain in zip(places, domains, strict=True):
            if chosen:
                chosen[:] = [chosen[n] for n in take_evenly(len(chosen), scale * domain.weight / len(chosen))]
    units = []
    for chosen, domain in zip(places, domains, strict=True):
        by_shard: dict[Shard, list[int]] = {}
        for shard, number in chosen:
            by_shard.setdefault(shard, []).append(number)
        units += [ShardUnit(domain.name, root, shard, tuple(numbers)) for shard, numbers in by_shard.items()]
    if not units:
        raise DataError(f"--input {root}: no samples in {', '.join(domain.name for domain in domains)}")
    return units
