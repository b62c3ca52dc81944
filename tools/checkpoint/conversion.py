"""Hugging Face folder to Megatron checkpoint and back, one tensor of one layer in memory at a time."""

from argparse import Namespace
from functools import lru_cache, partial
from pathlib import Path

import torch

from megatron_mtrain.qwen_shape import QwenShape, from_hf, to_arguments
from tools.checkpoint import safetensors_folder, torch_dist
from tools.checkpoint.names import Row, extra_states, table
from tools.checkpoint.qwen_folder import (
    CONFIG,
    KEPT,
    copy_beside,
    original_folder,
    read_config,
    trained_shape,
    write_config,
)
from tools.checkpoint.safetensors_folder import Planned, SafetensorsFolder
from tools.checkpoint.torch_dist import Piece, TorchDistReader

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def to_megatron(source: Path, target: Path, dtype: torch.dtype | None = None) -> QwenShape:
    """Writes the model in the Hugging Face folder `source` as a Megatron checkpoint into the empty folder
    `target`.

    `dtype` is that of the weights, the source's if None. Raises ValueError for a folder that is incomplete,
    damaged or another model."""
    config = read_config(source)
    shape = from_hf(config, str(source / CONFIG))
    weights = SafetensorsFolder(source)
    rows = table(shape)
    _check_source(weights, rows, shape)
    dtype = dtype or _only_dtype(weights, rows, shape)
    pieces = [_piece(weights, row, layer, shape, dtype) for row in rows for layer in _layers(row, shape)]
    about = {"max_position_embeddings": shape.max_positions, "params_dtype": dtype}
    about |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    torch_dist.write(target, pieces, extra_states(shape), Namespace(**to_arguments(shape), **about))
    kept = target / KEPT
    kept.mkdir()
    write_config(shape, config, dtype, kept)
    copy_beside(source, kept)
    return shape


def _layers(row: Row, shape: QwenShape) -> range:
    return range(shape.num_layers if row.per_layer else 1)


def _check_source(weights: SafetensorsFolder, rows: list[Row], shape: QwenShape) -> None:
    expected = {
        name: size
        for row in rows
        for layer in _layers(row, shape)
        for name, size in zip(row.hf_names(layer), row.shapes, strict=True)
    }
    there = weights.names()
    if missing := sorted(expected.keys() - there):
        raise ValueError(
            f"{weights.folder} lacks {missing[0]} and {len(missing) - 1} more of {len(expected)} tensors of "
            f"the {shape.family} in {CONFIG}; download it again"
        )
    # A tied output layer may be saved with the embedding; rotary frequencies were, once.
    harmless = {"lm_head.weight"} if shape.tied else set()
    unknown = sorted(name for name in there - expected.keys() - harmless if "rotary_emb" not in name)
    if unknown:
        raise ValueError(
            f"{weights.folder} has {unknown[0]} ({len(unknown)} tensors in all), which the {shape.family} in "
            f"{CONFIG} has not; this is another architecture"
        )
    for name, size in expected.items():
        if weights.shape(name) != size:
            raise ValueError(
                f"{weights.folder}: {name} has shape {list(weights.shape(name))}, {CONFIG} makes it "
                f"{list(size)} ({_reason(name, shape)}); one of them is of another model"
            )


def _reason(name: str, shape: QwenShape) -> str:
    if "embed" in name or "lm_head" in name:
        return f"vocab_size {shape.vocab_size}, hidden_size {shape.hidden_size}"
    if ".mlp." in name:
        return f"intermediate_size {shape.ffn_hidden_size}, hidden_size {shape.hidden_size}"
    heads = f"{shape.num_heads} heads and {shape.num_groups} key heads of {shape.head_dim}"
    return f"{heads}, hidden_size {shape.hidden_size}"


def _only_dtype(weights: SafetensorsFolder, rows: list[Row], shape: QwenShape) -> torch.dtype:
    names = [name for row in rows for layer in _layers(row, shape) for name in row.hf_names(layer)]
    found = {weights.dtype(name) for name in names}
    if len(found) > 1:
        kinds = " and ".join(sorted(map(str, found)))
        raise ValueError(f"{weights.folder} has tensors of {kinds}; choose one with --dtype")
    return found.pop()


def _piece(weights: SafetensorsFolder, row: Row, layer: int, shape: QwenShape, dtype: torch.dtype) -> Piece:
    def make() -> torch.Tensor:
        joined = row.join([weights.read(name) for name in row.hf_names(layer)]).to(dtype)
        return joined[None] if row.per_layer else joined

    sizes, zeros = row.shape, (0,) * len(row.shape)
    if not row.per_layer:
        return Piece(row.megatron, sizes, zeros, sizes, dtype, make)
    return Piece(row.megatron, (shape.num_layers, *sizes), (layer, *zeros), (1, *sizes), dtype, make)


def to_hf(
    source: Path, target: Path, hf_config: Path | None = None, dtype: torch.dtype | None = None
) -> QwenShape:
    """Writes the newest checkpoint in `source` as a Hugging Face folder into the empty folder `target`.

    `hf_config` is the folder of the original model (see `original_folder`). Padding of the vocabulary is cut
    off. Raises ValueError for a checkpoint that is incomplete, damaged or another model than the original.
    """
    checkpoint = TorchDistReader(torch_dist.newest(source))
    original = original_folder(hf_config, source, checkpoint.args)
    config = read_config(original) if original else None
    shape = trained_shape(checkpoint.args, checkpoint.folder, config, original)
    readers, planned = {}, []
    joined = lru_cache(maxsize=1)(
        partial(_joined, checkpoint)
    )  # q, k and v, one after the other, come of one tensor
    for row in table(shape):
        stored = _check_stored(checkpoint, row, shape)
        for layer in _layers(row, shape):
            for part, (name, size) in enumerate(zip(row.hf_names(layer), row.shapes, strict=True)):
                readers[name] = partial(_read_part, joined, row, layer, part, dtype or stored)
                planned.append(Planned(name, size, dtype or stored))
    safetensors_folder.write(target, planned, lambda name: readers[name]())
    write_config(shape, config, planned[0].dtype, target)
    tokenizer = original or Path(getattr(checkpoint.args, "tokenizer_model", None) or target)
    if tokenizer.is_dir() and tokenizer != target:
        copy_beside(tokenizer, target)
    return shape


def _check_stored(checkpoint: TorchDistReader, row: Row, shape: QwenShape) -> torch.dtype:
    """The dtype of a tensor in the checkpoint; ValueError when it is missing or has another shape."""
    entry = checkpoint.entry(row.megatron)
    if entry is None:
        raise ValueError(
            f"{checkpoint.folder} has no {row.megatron}, a tensor of every {shape.family}; it is another "
            "model, or its layers were not stacked (homogeneous)"
        )
    expected = (shape.num_layers, *row.shape) if row.per_layer else row.shape
    stored = tuple(entry.size)
    if not row.per_layer and row.shape[0] == shape.vocab_size and stored[1:] == expected[1:]:
        if stored[0] < shape.vocab_size:
            raise ValueError(
                f"{checkpoint.folder}: {row.megatron} has {stored[0]} rows, fewer than the vocabulary of "
                f"{shape.vocab_size}; give the folder of the model it was trained from with --hf-config"
            )
    elif stored != expected:
        raise ValueError(
            f"{checkpoint.folder}: {row.megatron} has shape {list(stored)}, its arguments make it "
            f"{list(expected)}; the checkpoint is another model's"
        )
    return entry.properties.dtype


def _joined(checkpoint: TorchDistReader, row: Row, layer: int) -> torch.Tensor:
    zeros = (0,) * len(row.shape)
    if not row.per_layer:
        return checkpoint.read(row.megatron, zeros, row.shape)
    return checkpoint.read(row.megatron, (layer, *zeros), (1, *row.shape))[0]


def _read_part(joined, row: Row, layer: int, part: int, dtype: torch.dtype) -> torch.Tensor:
    return row.split(joined(row, layer))[part].to(dtype)
