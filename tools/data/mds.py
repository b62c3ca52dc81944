"""Read MosaicML MDS shards (format version 2) without the streaming package, which pins older libraries.

A raw shard, little-endian: uint32 sample count n; n + 1 uint32 offsets from the start of the file; the JSON
configuration; the samples. A sample: a uint32 size for every column of variable size, then the columns'
bytes. An `ndarray` starts with one byte (ndim << 2 | w) and ndim sizes of 2**w bytes, unless its shape is
fixed.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy

from tools.data.files import DataError, naming
from tools.data.mds_files import Stored, check, check_download, read_checked, unpack

SCALARS = {name: numpy.dtype(name) for name in (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
)} | {"int": numpy.dtype("int64")}  # fmt: skip
# The byte that an array of free type starts with: bits in the number, 1 added for signed, 2 for floating
# point.
ARRAY_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
               34: "float32", 64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One entry of index.json; `columns` holds (name, encoding, fixed size in bytes or None) as stored."""

    raw: Stored
    packed: Stored | None
    compression: str | None
    samples: int
    columns: tuple[tuple[str, str, int | None], ...]

    @property
    def file(self) -> Stored:
        """The file to read: the packed one, or the raw one where there is no packed one."""
        return (
            self.packed
            if self.packed and (self.packed.path.exists() or not self.raw.path.exists())
            else self.raw
        )

    @property
    def path(self) -> Path:
        """The path of the file to read."""
        return self.file.path


def read_index(folder: Path) -> list[Shard]:
    """The shards that `folder`/index.json lists, in its order. Raises DataError."""
    path = folder / "index.json"
    with naming("read", path):
        text = path.read_bytes()
    try:
        index = json.loads(text)
        if index["version"] != 2:
            raise DataError(
                f"{path}: version {index['version']} of the MDS index; this reader knows version 2"
            )
        return [_shard(folder, entry) for entry in index["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: not an MDS index ({type(error).__name__}: {error}); download it again"
        ) from None


def _shard(folder: Path, entry: dict) -> Shard:
    if entry["format"] != "mds":
        raise DataError(
            f"{folder / 'index.json'}: shards of format {entry['format']!r}; this reader knows 'mds'"
        )

    def stored(item: dict) -> Stored:
        name = item["basename"]
        # A downloaded index must not make this reader open files elsewhere.
        if not (folder / name).resolve().is_relative_to(folder.resolve()) or "\0" in name:
            raise ValueError(f"file name {name!r} leads out of the folder")
        return Stored(folder / name, _number(item["bytes"]), tuple(sorted(item["hashes"].items())))

    sizes = [size if size is None else _number(size) for size in entry["column_sizes"]]
    columns = zip(entry["column_names"], entry["column_encodings"], sizes, strict=True)
    packed = stored(entry["zip_data"]) if entry["zip_data"] else None
    compression = entry["compression"]
    if not isinstance(compression, str | None):
        raise ValueError(f"compression {compression!r} is no name")
    return Shard(stored(entry["raw_data"]), packed, compression, _number(entry["samples"]), tuple(columns))


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} stands where a number of bytes or samples has to be")
    return value


class ShardReader:
    """The checked bytes of one shard: `sample(number, names)` decodes columns, `sha256` is the file's."""

    def __init__(self, shard: Shard) -> None:
        """Read, check and unpack the shard. Raises DataError when it is missing, cut or damaged."""
        self.path, self.columns = shard.path, shard.columns
        data = read_checked(shard.file)
        self.sha256 = hashlib.sha256(data).hexdigest()
        check_download(self.path, self.sha256)
        if shard.file is shard.packed:
            data = unpack(self.path, shard.compression, data, shard.raw.size)
            check(self.path, data, shard.raw, "unpacked ")
        self._data = memoryview(data)
        self._offsets = self._read_offsets(shard.samples)

    def _fail(self, reason: str) -> DataError:
        return DataError(f"{self.path}: damaged shard, {reason}; download it again")

    def _read_offsets(self, samples: int) -> numpy.ndarray:
        start = 4 * (samples + 2)
        if len(self._data) < start or int.from_bytes(self._data[:4], "little") != samples:
            raise self._fail(f"its header does not hold the {samples} samples of index.json")
        offsets = numpy.frombuffer(self._data, "<u4", samples + 1, 4).astype(numpy.int64)
        if offsets[0] < start or offsets[-1] != len(self._data) or (numpy.diff(offsets) < 0).any():
            raise self._fail("its sample offsets do not ascend to the end of the file")
        try:
            inner = json.loads(bytes(self._data[start : offsets[0]]))
            columns = tuple(
                zip(inner["column_names"], inner["column_encodings"], inner["column_sizes"], strict=True)
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._fail("its JSON header cannot be read") from None
        if columns != self.columns:
            raise self._fail("its columns are not those of index.json")
        return offsets

    def sample(self, number: int, names: tuple[str, ...]) -> dict:
        """The decoded columns `names` of a sample; a column the shard lacks is left out. Raises DataError."""
        begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
        free = sum(size is None for _, _, size in self.columns)
        if begin + 4 * free > end:
            raise self._fail(f"sample {number} is cut")
        sizes = iter(numpy.frombuffer(self._data, "<u4", free, begin).tolist())
        position, values = begin + 4 * free, {}
        for name, encoding, size in self.columns:
            size = next(sizes) if size is None else size
            if name in names:
                try:
                    values[name] = decode(encoding, self._data[position : min(position + size, end)])
                except (ValueError, IndexError, KeyError, OverflowError):
                    raise self._fail(f"column {name} of sample {number} is not {encoding}") from None
            position += size
        if position != end:
            raise self._fail(f"the column sizes of sample {number} do not add up")
        return values


def decode(encoding: str, data: memoryview) -> object:
    """The value that `data` holds in an MDS column encoding (strings, bytes, numbers, arrays).

    Raises ValueError, IndexError, KeyError or OverflowError when the bytes do not fit, DataError for an
    encoding not known here.
    """
    kind, _, detail = encoding.partition(":")
    if kind in SCALARS:
        (value,) = numpy.frombuffer(data, SCALARS[kind].newbyteorder("<"))
        return value
    if kind == "bytes":
        return bytes(data)
    if kind == "str":
        return str(data, "utf-8")
    if kind != "ndarray":
        raise DataError(
            f"MDS column encoding {encoding!r} is not supported; supported: str, bytes, ndarray, numbers"
        )
    name, _, fixed = detail.partition(":")
    if not name:
        name, data = ARRAY_TYPES[data[0]], data[1:]
    if fixed:
        shape = [int(size) for size in fixed.split(",")]
    else:
        dimensions, width = data[0] >> 2, 1 << (data[0] & 3)
        shape = numpy.frombuffer(data, f"<u{width}", dimensions, 1).tolist()
        data = data[1 + dimensions * width :]
    return numpy.frombuffer(data, SCALARS[name].newbyteorder("<")).reshape(shape)
