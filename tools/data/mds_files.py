"""The files of MDS shards: sizes and hashes checked, compressed ones unpacked."""

import bz2
import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

from tools.data.files import DataError, naming


@dataclass(frozen=True)
class Stored:
    """A file of a shard as the index describes it: path, size in bytes, {algorithm: hexadecimal digest}."""

    path: Path
    size: int
    hashes: tuple[tuple[str, str], ...]


def read_checked(file: Stored) -> bytes:
    """The bytes of a file, which have the size and hashes of the index. Raises DataError."""
    with naming("read", file.path):
        data = file.path.read_bytes()
    check(file.path, data, file, "")
    return data


def check(path: Path, data: bytes, expected: Stored, what: str) -> None:
    """Raise DataError, with `what` in its text, when `data` has not the size and hashes of the index."""
    if len(data) != expected.size:
        raise DataError(
            f"{path}: {what}size is {len(data)} bytes, index.json says {expected.size}; download it again"
        )
    for algorithm, digest in expected.hashes:
        try:
            found = _digest(algorithm, data)
        except (ImportError, AttributeError):
            raise DataError(
                f"{path}: index.json has a {algorithm} hash; `pip install xxhash` to check it"
            ) from None
        if found != digest:
            raise DataError(
                f"{path}: {what}{algorithm} is {found}, index.json says {digest}; download it again"
            )


def _digest(algorithm: str, data: bytes) -> str:
    if algorithm in hashlib.algorithms_available:
        return hashlib.new(algorithm, data).hexdigest()
    import xxhash

    return getattr(xxhash, algorithm)(data).hexdigest()


def check_download(path: Path, sha256: str) -> None:
    """Compare with the SHA-256 that huggingface_hub notes beside a download; ProLong's index has none."""
    path = path.absolute()
    for folder in path.parents[:6]:
        note = folder / ".cache/huggingface/download" / f"{path.relative_to(folder)}.metadata"
        if note.is_file():
            lines = note.read_text().split()
            if len(lines) > 1 and len(lines[1]) == 64 and lines[1] != sha256:
                raise DataError(
                    f"{path}: sha256 is {sha256}, the hub's is {lines[1]}; delete and download it again"
                )
            return


def unpack(path: Path, compression: str | None, data: bytes, size: int) -> bytes:
    """`data` unpacked to `size` bytes. Raises DataError when it is damaged or of an unknown compression."""
    algorithm = (compression or "").partition(":")[0]
    try:
        if algorithm == "gz":
            return gzip.decompress(data)
        if algorithm == "bz2":
            return bz2.decompress(data)
        if algorithm == "zstd":
            import zstandard

            return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except ImportError:
        raise DataError(f"{path}: zstd shards need the package zstandard; pip install zstandard") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: damaged shard, cannot unpack it ({error}); download it again") from None
    except Exception as error:
        # zstandard.ZstdError is known by name only where the package is installed.
        raise DataError(f"{path}: damaged shard, cannot unpack it ({error}); download it again") from None
    raise DataError(f"{path}: compression {compression!r} is not supported; supported: zstd, gz, bz2")
