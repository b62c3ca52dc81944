"""A folder that appears whole or not at all."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, renamed to it when the block ends and removed when the block fails.

    `path` may be an empty folder. Raises ValueError when it is not, or when its parent does not exist.
    """
    path = Path(os.path.abspath(path))
    check_vacant(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it is removed then, too
    try:
        scratch.mkdir()
        yield scratch
        os.replace(scratch, path)
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(scratch, ignore_errors=True)


def check_vacant(path: Path) -> None:
    """Raises ValueError unless a folder can be made at `path`."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose another --out")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; choose another --out, or empty it")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} does not exist; make it, or choose another --out")
