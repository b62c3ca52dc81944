"""Hugging Face's safetensors, one file or several with an index: read a tensor at a time, written a tensor
at a time.

A file is a little-endian length of 8 bytes, a JSON header of that length with dtype, shape and place of
every tensor, and the tensors' bytes. The library writes a file from tensors that are all in memory; `write`
here needs one."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000  # as on the hub
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class SafetensorsFolder:
    """The tensors of a model folder by name. Raises ValueError when a file is missing or damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = {name: self._open(folder / name) for name in self._file_names()}
        self._file_of = {tensor: file for file in self._files.values() for tensor in file.keys()}  # noqa: SIM118

    def _file_names(self) -> list[str]:
        index = self.folder / INDEX
        if not index.is_file():
            if (self.folder / SINGLE).is_file():
                return [SINGLE]
            raise ValueError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}; save the model with save_pretrained"
            )
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} is damaged: it has no weight_map; download it again") from None
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder} lacks {missing[0]} ({len(missing)} of the {len(names)} files that {INDEX} "
                "names); download it again"
            )
        return names

    @staticmethod
    def _open(path: Path):
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}); download it again") from None

    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor. Raises ValueError for one that no Qwen model has, such as an integer."""
        kind = self._file_of[name].get_slice(name).get_dtype()
        if kind not in DTYPES:
            raise ValueError(f"{self.folder}: {name} is of type {kind}; only {', '.join(DTYPES)} can be used")
        return DTYPES[kind]

    def read(self, name: str) -> torch.Tensor:
        """A tensor."""
        return self._file_of[name].get_tensor(name)


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written, known by shape until then."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    folder: Path,
    planned: Iterable[Planned],
    read: Callable[[str], torch.Tensor],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes tensors in the given order into files of at most `shard_bytes`, with an index when there are
    several.

    `read(name)` makes a tensor when it is written.
    """
    shards: list[list[Planned]] = []
    for tensor in planned:
        if not shards or sum(other.bytes for other in shards[-1]) + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    total = len(shards)
    names = (
        [SINGLE] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    )
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, read)
    if total > 1:
        size = sum(tensor.bytes for shard in shards for tensor in shard)
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, tensors: list[Planned], read: Callable[[str], torch.Tensor]) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        place = [end, end := end + tensor.bytes]
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data aligned for readers that map it
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = read(tensor.name).contiguous()
            assert (tuple(data.shape), data.dtype) == (tensor.shape, tensor.dtype), tensor.name
            stream.write(data.flatten().view(torch.uint8).numpy())
