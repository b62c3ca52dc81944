"""File helpers of the data tools: errors that name the file, atomic writes, hashes, one writer at a time."""

import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path


class DataError(Exception):
    """Input that is wrong or damaged, or a file that cannot be read or written; its text is for the user."""


@contextmanager
def naming(action: str, path: os.PathLike | str) -> Iterator[None]:
    """Turn an OSError inside the block into a DataError "cannot ACTION PATH: reason".

    Failed writes need it: an OSError of write() knows the reason but not the file.
    """
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "; make room and run the same command again, finished parts are kept"
        raise DataError(f"cannot {action} {path}: {error.strerror or error}{hint}") from None


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that the name holds all of it or is not touched. Raises DataError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with naming("write", path):
        try:
            with open(scratch, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def read_json(path: os.PathLike | str) -> dict:
    """The JSON in a file. Raises DataError."""
    with naming("read", path):
        text = Path(path).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); remove it") from None


def sha256_file(path: Path, size: int | None = None) -> str:
    """The hexadecimal SHA-256 of a file, or of its first `size` bytes, read in pieces. Raises DataError."""
    digest = hashlib.sha256()
    with naming("read", path), open(path, "rb") as stream:
        left = os.fstat(stream.fileno()).st_size if size is None else size
        while left and (data := stream.read(min(left, 1 << 20))):
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`; the system releases it when the process ends, however it ends.

    Raises DataError when another process holds it.
    """
    with naming("write", folder), open(folder / "lock", "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"another run is writing {folder}; wait for it or choose another --output"
            ) from None
        yield


def run_tool(name: str, function: Callable[[], None]) -> None:
    """Call a tool's main function; a user's errors end in one line and exit code 1 (interrupted: 130)."""
    try:
        function()
    except DataError as error:
        sys.exit(f"{name}: {error}")
    except BrokenProcessPool:
        sys.exit(f"{name}: a worker was killed, probably for memory; run again with fewer --workers to go on")
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted; the same command goes on from here\n")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a report (head, less) went away: nothing to say, and nothing more to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
