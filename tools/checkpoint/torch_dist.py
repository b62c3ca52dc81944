"""Megatron's torch_dist checkpoints without Megatron's model: written and read a tensor at a time, by one
process.

A checkpoint folder holds `latest_checkpointed_iteration.txt`, which names the subfolder of the tensors:
iter_0000010, or `release` for weights from elsewhere, which Megatron loads without optimizer state and
starts at iteration 0."""

import io
import json
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_mtrain.metadata import check_metadata
from megatron_mtrain.presets import common_state

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMMON = "common_state/shard_0_1"  # Megatron's key of everything that is no tensor


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of the checkpoint, made when it is its turn to be written."""

    key: str
    whole: tuple[int, ...]  # shape of the tensor
    offsets: tuple[int, ...]  # where the part begins
    sizes: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


class _Writing(DefaultSavePlanner):
    """Makes each part when the writer asks for it, so that one at a time is in memory."""

    def __init__(self, sources: dict):
        super().__init__()
        self.sources = sources

    def resolve_data(self, write_item: WriteItem):
        place = write_item.index
        source = self.sources[place.fqn, place.offset]
        return source() if callable(source) else io.BytesIO(source)


def write(
    folder: Path, pieces: Iterable[Piece], states: Iterable[tuple[str, int, int]], args: Namespace
) -> None:
    """Writes a `release` checkpoint into an empty folder.

    `states` are (key, layer, number of layers) of the empty extra states; `args` are the arguments with
    which Megatron builds the model."""
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "content_metadata": {}}
    sources, items = {}, []
    objects = {f"{key}/shard_{i}_{n}": torch.empty(0, dtype=torch.uint8) for key, i, n in states}
    for key, value in (objects | {COMMON: common}).items():
        sources[key, None] = _serialized([value])
        items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
    for piece in pieces:
        offsets = torch.Size(piece.offsets)
        sources[piece.key, offsets] = piece.make
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece.sizes)),
            properties=TensorProperties(dtype=piece.dtype),
            size=torch.Size(piece.whole),
        )
        items.append(WriteItem(MetadataIndex(piece.key, offsets), WriteItemType.SHARD, tensor_data=data))
    target = folder / RELEASE
    # Copying ahead is for tensors on a GPU; here it would hold several in memory.
    writer = FileSystemWriter(target, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(SavePlan(items))
    plans, metadata = create_default_global_save_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(plan, _Writing(sources)).value()
    writer.finish(metadata, [results])
    (target / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (folder / TRACKER).write_text(RELEASE)


def _serialized(value) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def newest(folder: Path) -> Path:
    """The subfolder of a checkpoint folder that Megatron would load. Raises ValueError when there is none."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise ValueError(f"{folder} has no {TRACKER}; give the folder that Megatron's --save named")
    text = tracker.read_text().strip()
    if text != RELEASE and not text.isdecimal():
        raise ValueError(f"{tracker} says {text!r}; it has to be an iteration or {RELEASE}")
    found = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not (found / ".metadata").is_file():
        raise ValueError(
            f"{found} is no torch_dist checkpoint: it has no .metadata; save with --ckpt-format torch_dist"
        )
    return found


class TorchDistReader:
    """The tensors and the arguments of one checkpoint."""

    def __init__(self, folder: Path):
        self.folder = folder
        check_metadata(folder)
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except (EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{folder} is damaged ({error}); copy it again") from None
        self._reader.set_up_storage_reader(self._metadata, True)
        self.common = common_state(folder)

    @property
    def args(self) -> Namespace:
        """The arguments that Megatron built the model from."""
        if "args" not in self.common:
            raise ValueError(
                f"{self.folder} has no arguments of the run that wrote it; save it with Megatron again"
            )
        return self.common["args"]

    def entry(self, key: str) -> TensorStorageMetadata | None:
        """Shape (`size`) and dtype (`properties.dtype`) of a tensor, None if the checkpoint has none."""
        found = self._metadata.state_dict_metadata.get(key)
        return found if isinstance(found, TensorStorageMetadata) else None

    def read(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """A part of a tensor, from whatever shards the ranks of the run wrote. Raises ValueError when some
        are missing."""
        entry = self.entry(key)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [chunk])
        part = torch.empty(sizes, dtype=entry.properties.dtype)
        if sum(item.lengths.numel() for item in items) != part.numel():
            raise ValueError(
                f"{self.folder}: {key} is not complete; the checkpoint lacks shards, copy it again"
            )
        try:
            self._reader.read_data(LoadPlan(items), _Reading(part)).value()
        except OSError as error:
            raise ValueError(
                f"{self.folder}: cannot read {key} ({error}); copy the checkpoint again"
            ) from None
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{self.folder}: {key} is damaged ({error}); copy the checkpoint again"
            ) from None
        return part


class _Reading(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, part: torch.Tensor):
        super().__init__()
        self.part = part

    def resolve_tensor(self, read_item):
        view = self.part
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item, tensor) -> None:
        """Nothing: `tensor` is the view that was filled."""
