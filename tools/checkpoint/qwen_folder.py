"""What stands beside the weights in a Hugging Face folder: config.json, tokenizer, generation settings."""

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch

from megatron_mtrain.qwen_shape import QwenShape, from_arguments, from_hf, to_hf

CONFIG = "config.json"
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
KEPT = "hf"  # subfolder of a converted checkpoint with the files above
# Two descriptions of one model have to agree on these; the vocabulary is compared apart, it may be padded.
SIZES = (
    *("family", "num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_groups", "head_dim"),
    "tied",
)


def read_config(folder: Path) -> dict:
    """The config.json of a folder. Raises ValueError when it is missing or no JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}; give the folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object; download it again")
    return config


def copy_beside(source: Path, target: Path) -> list[str]:
    """Copies the tokenizer and the generation settings that `source` has; returns their names."""
    names = [name for name in BESIDE if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def write_config(shape: QwenShape, base: dict | None, dtype: torch.dtype, target: Path) -> None:
    """Writes config.json for weights of `dtype`; `base` is that of the original model, if known."""
    config = to_hf(shape, base)
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def original_folder(given: Path | None, megatron: Path, args: Namespace) -> Path | None:
    """The Hugging Face folder a trained model came from: the given one, the copy in its checkpoint, or what
    its run named as --model or loaded. None when none of them is there."""
    if given is not None:
        return given
    named = [megatron / KEPT]
    if getattr(args, "model", None):
        named.append(Path(args.model))
    if getattr(args, "load", None):
        named.append(Path(args.load) / KEPT)
    return next((folder for folder in named if (folder / CONFIG).is_file()), None)


def trained_shape(args: Namespace, where: Path, base: dict | None, source: Path | None) -> QwenShape:
    """The shape of the trained model, with the vocabulary of the original one.

    `base` is the config.json of `source`. Raises ValueError when the two are different models.
    """
    shape = from_arguments(args, str(where))
    if base is None:
        return shape
    path = source / CONFIG
    original = from_hf(base, str(path))
    for name in SIZES:
        mine, other = getattr(shape, name), getattr(original, name)
        if mine != other:
            raise ValueError(
                f"{where} has {name} {mine}, {path} has {other}; give the folder of the model it was trained "
                "from with --hf-config"
            )
    if args.vocab_size and args.vocab_size != original.vocab_size:
        raise ValueError(
            f"{where} was trained with a vocabulary of {args.vocab_size}, {path} says {original.vocab_size}; "
            "give the folder of the model it was trained from with --hf-config"
        )
    return replace(shape, vocab_size=original.vocab_size)
