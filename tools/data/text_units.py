"""Units of text input: byte ranges of JSON Lines, row groups of Parquet, runs of plain text files."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.data.files import DataError, naming, sha256_file
from tools.data.text_tokenizers import TextTokenizer
from tools.data.units import Piece


@dataclass(frozen=True)
class LinesUnit:
    """The lines of a JSON Lines file that begin in bytes [begin, end); all of a compressed file."""

    domain: str
    path: Path
    begin: int
    end: int
    key: str

    @property
    def size(self) -> int:
        """Bytes of input."""
        return self.end - self.begin

    def identity(self) -> list:
        """The range and the state of its file."""
        return [self.begin, self.end, *file_state(self.path)]

    def samples(self, _source: TextTokenizer | None, counts: Counter) -> Iterator[list[list[Piece]]]:
        """One document a line. Raises DataError for a line that is no JSON object with text."""
        with naming("read", self.path), open_lines(self.path) as stream:
            position = self.begin
            if self.begin:  # the line that this offset falls into belongs to the range before
                stream.seek(self.begin - 1)
                position += len(stream.readline()) - 1
            compressed = self.path.suffix in (".gz", ".zst")
            while compressed or position < self.end:
                line = read_line(stream, self.path)
                if not line:
                    break
                if line.strip():
                    yield [[Piece(self._text(line, position, counts), True)]]
                position += len(line)

    def _text(self, line: bytes, position: int, counts: Counter) -> str:
        try:
            text = json.loads(line)[self.key]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, IndexError):
            where = f"{self.path}: the line at byte {position}"
            raise DataError(f"{where} is no JSON object with a string {self.key!r}; see --text-key") from None
        if b"\\u" in line and not is_unicode(text):
            # An escape for half a surrogate pair is legal JSON, but no tokenizer can take it.
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            counts["documents_changed_for_lone_surrogates"] += 1
        return text

    def sources(self) -> list[dict]:
        """The file, for the first range of it."""
        return [] if self.begin else [describe_file(self.path)]


@dataclass(frozen=True)
class RowsUnit:
    """One row group of a Parquet file."""

    domain: str
    path: Path
    group: int
    size: int
    key: str

    def identity(self) -> list:
        """The row group and the state of its file."""
        return [self.group, *file_state(self.path)]

    def samples(self, _source: TextTokenizer | None, counts: Counter) -> Iterator[list[list[Piece]]]:
        """One document a row; rows without a text are counted. Raises DataError for a damaged file."""
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with naming("read", self.path), ParquetFile(self.path) as file:
                for batch in file.iter_batches(64, row_groups=[self.group], columns=[self.key]):
                    for value in batch.column(0):
                        if value.is_valid:
                            yield [[Piece(value.as_py(), True)]]
                        else:
                            counts["empty_documents"] += 1
        except pyarrow.ArrowException as error:
            raise DataError(f"{self.path}: damaged row group {self.group} ({error})") from None

    def sources(self) -> list[dict]:
        """The file, for its first row group."""
        return [] if self.group else [describe_file(self.path)]


@dataclass(frozen=True)
class FilesUnit:
    """Plain text files, a document each; each is held in memory as a whole."""

    domain: str
    paths: tuple[Path, ...]
    size: int

    def identity(self) -> list:
        """The states of the files."""
        return [file_state(path) for path in self.paths]

    def samples(self, _source: TextTokenizer | None, _counts: Counter) -> Iterator[list[list[Piece]]]:
        """One document a file. Raises DataError for a file that is not UTF-8."""
        for path in self.paths:
            with naming("read", path):
                data = path.read_bytes()
            try:
                yield [[Piece(data.decode("utf-8"), True)]]
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}: not UTF-8 at byte {error.start}; convert it or leave it out"
                ) from None

    def sources(self) -> list[dict]:
        """The files."""
        return [describe_file(path) for path in self.paths]


def open_lines(path: Path) -> io.BufferedIOBase:
    """A stream of a file's lines, unpacked. Raises OSError, and DataError without the package it needs."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{path}: .zst files need the package zstandard; pip install zstandard") from None
        return io.BufferedReader(
            zstandard.ZstdDecompressor().stream_reader(open(path, "rb"), read_across_frames=True)
        )
    return open(path, "rb")


def read_line(stream: io.BufferedIOBase, path: Path) -> bytes:
    """The next line of a stream from `open_lines`. Raises DataError when its compressed data is damaged."""
    try:
        return stream.readline()
    except OSError:
        raise
    except Exception as error:  # EOFError, zlib.error, zstandard.ZstdError
        raise DataError(f"{path}: damaged file, cannot unpack it ({error})") from None


def is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def file_state(path: Path) -> list:
    """What tells an unchanged file: name, modification time in ns, size in bytes. Raises DataError."""
    with naming("read", path):
        state = path.stat()
    return [str(path), state.st_mtime_ns, state.st_size]


def describe_file(path: Path) -> dict:
    """Path, size in bytes and sha256 of a file, for the manifest. Raises DataError."""
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256_file(path)}
