"""What a run wrote for TensorBoard: its scalars by tag and the arguments that it was started with."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path

import numpy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tools.plot.figures import NoData

EVENTS = "events.out.tfevents.*"
GENERIC = ("tensorboard", "tb", "logs")  # folder names that do not tell runs apart


@dataclass(frozen=True)
class Series:
    """One scalar over training: steps int64 [n], ascending, and values float64 [n]."""

    steps: numpy.ndarray
    values: numpy.ndarray

    def last_mean(self, share: float = 0.5) -> float:
        """Mean of the last `share` of the values."""
        return float(self.values[-max(1, round(len(self.values) * share)) :].mean())


class Run:
    """The events in one folder; read_run makes it and says what is wrong with the folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 1})
        self._events.Reload()
        self._tags = self._events.Tags()

    @property
    def tags(self) -> list[str]:
        """All tags with scalars, in order."""
        return sorted(self._tags["scalars"])

    def has(self, tag: str) -> bool:
        return tag in self._tags["scalars"]

    def series(self, tag: str) -> Series:
        """The scalars of a tag; of a step that was written twice, after a resume, the later ones.

        Raises NoData when the run has none.
        """
        if not self.has(tag):
            raise NoData(f"{self.folder} has no {tag!r}; train without --no-log-attention")
        events = sorted(self._events.Scalars(tag), key=lambda event: event.wall_time)
        points = dict(sorted({event.step: event.value for event in events}.items()))
        return Series(numpy.array([*points], dtype=numpy.int64), numpy.array([*points.values()], dtype=float))

    def numbered(self, pattern: str) -> dict[tuple[int, ...], Series]:
        """The series of all tags that match `pattern` as a whole, by the numbers in its groups, in order."""
        matches = {tag: re.fullmatch(pattern, tag) for tag in self.tags}
        found = {tuple(map(int, match.groups())): tag for tag, match in matches.items() if match}
        return {numbers: self.series(tag) for numbers, tag in sorted(found.items())}

    def table(self, tag: str) -> tuple[int, numpy.ndarray]:
        """(step, values) of the last tensor of a tag. Raises NoData when the run has none."""
        if tag not in self._tags["tensors"]:
            raise NoData(f"{self.folder} has no {tag!r}; train without --no-log-attention")
        event = self._events.Tensors(tag)[-1]
        return event.step, make_ndarray(event.tensor_proto)

    @cached_property
    def arguments(self) -> dict[str, str]:
        """Megatron's arguments by destination, as it wrote them; empty for a run that did not."""
        suffix = "/text_summary"
        texts = [tag for tag in self._tags["tensors"] if tag.endswith(suffix)]
        return {tag.removesuffix(suffix): self._text(tag) for tag in sorted(texts)}

    @property
    def written(self) -> datetime:
        """When the newest of its event files was written."""
        return datetime.fromtimestamp(max(path.stat().st_mtime for path in self.folder.glob(EVENTS)))

    def _text(self, tag: str) -> str:
        return self._events.Tensors(tag)[-1].tensor_proto.string_val[0].decode(errors="replace")

    def argument(self, name: str, kind: type = str):
        """One argument as `kind`, or None when the run has none or it is None or not of that kind."""
        text = self.arguments.get(name, "None")
        try:
            return None if text == "None" else kind(text)
        except ValueError:
            return None


@lru_cache(maxsize=32)
def read_run(folder: Path) -> Run:
    """The run whose events are in `folder`, or in the one folder below it that has any.

    Raises ValueError for a folder that does not exist, has no events, or has those of several runs.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the one that --tensorboard-dir named")
    holders = sorted({path.parent for path in folder.rglob(EVENTS)})
    if folder in holders:
        holders = [folder]
    if not holders:
        raise ValueError(
            f"{folder} has no TensorBoard events ({EVENTS}); give the folder that --tensorboard-dir named"
        )
    if len(holders) > 1:
        names = ", ".join(str(holder) for holder in holders[:5])
        raise ValueError(f"{folder} has the events of {len(holders)} runs; give one of {names}")
    run = Run(holders[0])
    if not run.tags and not run.arguments:
        raise ValueError(f"{holders[0]} has event files, but nothing readable in them; has the run begun?")
    return run


def names_of(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: its last parts, as many as tell them apart, without a final
    "tensorboard"."""
    parts = []
    for folder in folders:
        path = folder.resolve()
        parts.append(path.parts[:-1] if path.name in GENERIC and len(path.parts) > 2 else path.parts)
    longest = max(map(len, parts), default=1)
    for length in range(1, longest + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names
