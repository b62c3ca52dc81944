"""Two processes in which the scripts of examples/ and the command lines of its recipes run."""

from pathlib import Path

import pytest

from tests.model.trainers import Trainers


class Scripts:
    """`run` gives what a script wrote on each rank."""

    def __init__(self, folder: Path):
        self.folder, self.trainers = folder, Trainers(folder, size=2)

    def run(self, script: str, flags=(), ranks: int = 1) -> list[str]:
        """Output of every rank. Raises RuntimeError with the traceback of a rank that failed."""
        logs = [self.folder / f"rank{rank}.log" for rank in range(ranks)]
        before = [log.stat().st_size if log.exists() else 0 for log in logs]
        self.trainers.run(ranks, list(flags), script=script)
        return [log.read_bytes()[size:].decode() for log, size in zip(logs, before, strict=True)]


@pytest.fixture(scope="session")
def scripts(tmp_path_factory):
    started = Scripts(tmp_path_factory.mktemp("scripts"))
    yield started
    started.trainers.stop()
