"""--model and --rope-scaling: a Qwen model's sizes, and an extended context, as defaults of Megatron's own
flags.

`add_arguments(parser)` reads the two flags ahead of the others and sets defaults from them, so that an
explicit flag wins; `check(args)` then refuses what contradicts itself or the checkpoint that will be loaded.
"""

import json
import pickle
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.training.argument_utils import ArgumentGroupFactory
from torch.distributed.checkpoint.api import CheckpointException

from . import yarn
from .qwen_shape import QwenShape, from_hf, to_arguments

# Of the model cards. name: (layers, hidden, feed-forward, heads, key heads, vocabulary, tied embeddings)
QWEN2_5 = {
    "0.5b": (24, 896, 4864, 14, 2, 151936, True),
    "1.5b": (28, 1536, 8960, 12, 2, 151936, True),
    "3b": (36, 2048, 11008, 16, 2, 151936, True),
    "7b": (28, 3584, 18944, 28, 4, 152064, False),
    "14b": (48, 5120, 13824, 40, 8, 152064, False),
    "32b": (64, 5120, 27648, 40, 8, 152064, False),
    "72b": (80, 8192, 29568, 64, 8, 152064, False),
}
QWEN3 = {
    "0.6b": (28, 1024, 3072, 16, 8, 151936, True),
    "1.7b": (28, 2048, 6144, 16, 8, 151936, True),
    "4b": (36, 2560, 9728, 32, 8, 151936, True),
    "8b": (36, 4096, 12288, 32, 8, 151936, False),
    "14b": (40, 5120, 17408, 40, 8, 151936, False),
    "32b": (64, 5120, 25600, 64, 8, 151936, False),
}
NAMES = [f"qwen2.5-{size}" for size in QWEN2_5] + [f"qwen3-{size}" for size in QWEN3]
PRETRAINED_LENGTH = 32768  # tokens; their YaRN starts from here, whatever max_position_embeddings says
# Arguments on which the tensors of a checkpoint depend.
WEIGHTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "untie_embeddings_and_output_weights"),
    *("num_attention_heads", "num_query_groups", "kv_channels", "add_qkv_bias", "qk_layernorm"),
    *("normalization", "swiglu", "add_bias_linear"),
)


@dataclass
class ModelArguments:
    """The Qwen model, its context, and which of its parameters are trained."""

    model: str | None = None
    """Defaults of all size flags: qwen2.5-0.5b to -72b, qwen3-0.6b to -32b, or a Hugging Face folder."""

    rope_scaling: str | None = None
    """Extended context: yarn:FACTOR, or yarn:FACTOR:TOKENS with the length before extension (32768)."""

    trainable: list[str] | None = None
    """Regular expressions: train parameters whose names they find, as self_attention; freeze the others."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the group "Qwen model" to Megatron's parser and sets the defaults that its flags on this command
    line ask for. Raises ValueError for an unknown model or scaling."""
    ArgumentGroupFactory(ModelArguments).build_group(parser, title="Qwen model")
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--model", "--rope-scaling", "--tokenizer-type", "--tokenizer-model"):
        early.add_argument(flag)
    early.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.set_defaults(**defaults(early.parse_known_args(sys.argv[1:])[0]))


def defaults(args: Namespace) -> dict:
    """Megatron's arguments by destination for --model and --rope-scaling."""
    found, original = {}, PRETRAINED_LENGTH
    if args.model is not None:
        shape = model_shape(args.model)
        found = to_arguments(shape)
        found["make_vocab_size_divisible_by"] = vocabulary_divisor(
            shape.vocab_size, args.tensor_model_parallel_size
        )
        original = shape.yarn.original if shape.yarn else min(PRETRAINED_LENGTH, shape.max_positions)
        if args.tokenizer_type is None and args.tokenizer_model is None and _has_tokenizer(args.model):
            found |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": args.model}
    if args.rope_scaling is not None:
        found |= yarn.to_arguments(yarn.parse(args.rope_scaling, original))
    return found


def model_shape(name: str) -> QwenShape:
    """The shape of a named model or of the one in a Hugging Face folder. Raises ValueError for an unknown
    name."""
    family, _, size = name.lower().partition("-")
    sizes = {"qwen2.5": QWEN2_5, "qwen3": QWEN3}.get(family, {}).get(size)
    if sizes is not None:
        layers, hidden, ffn, heads, groups, vocabulary, tied = sizes
        dim, positions = (hidden // heads, 32768) if family == "qwen2.5" else (128, 40960)
        kind = family.partition(".")[0]
        shape = QwenShape(kind, layers, hidden, ffn, heads, groups, dim, vocabulary, tied)
        return replace(shape, max_positions=positions)
    path = Path(name) / "config.json"
    if not path.is_file():
        raise ValueError(f"--model {name} is neither a folder with config.json nor one of {', '.join(NAMES)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); download it again") from None
    return from_hf(config, str(path))


def _has_tokenizer(name: str) -> bool:
    return any((Path(name) / file).is_file() for file in ("tokenizer.json", "vocab.json"))


def vocabulary_divisor(vocab_size: int, tensor_size: int) -> int:
    """--make-vocab-size-divisible-by with which tensor-parallel ranks share the vocabulary with least
    padding.

    Padding is not harmless: the loss counts its logits, and in a converted model they start at 0, not far
    below."""
    while tensor_size > 1 and vocab_size % tensor_size:
        vocab_size += 1
    share = vocab_size // tensor_size
    return min(share & -share, 128)


def check(args: Namespace) -> None:
    """Refuses, with a ValueError, flags that contradict --rope-scaling or the checkpoint that --load names.

    `args` are complete, as after Megatron's own validation.
    """
    if args.rope_scaling is not None:
        asked = yarn.parse(args.rope_scaling, args.yarn_original_max_position_embeddings)
        pairs = {
            "--position-embedding-type": (args.position_embedding_type, "yarn"),
            "--rotary-scaling-factor": (args.rotary_scaling_factor, asked.factor),
            "--yarn-original-max-position-embeddings": (
                args.yarn_original_max_position_embeddings,
                asked.original,
            ),
        }
        for flag, (given, wanted) in pairs.items():
            if given != wanted:
                raise ValueError(
                    f"{flag} {given} contradicts --rope-scaling {args.rope_scaling}; leave one out"
                )
    _check_checkpoint(args)


def _check_checkpoint(args: Namespace) -> None:
    stored = checkpoint_arguments(args.load)
    for name in WEIGHTS:
        ours, theirs = getattr(args, name), getattr(stored, name, None)
        if ours is None or theirs is None or ours == theirs:
            continue
        hint = (
            "leave out --model or give that of the checkpoint"
            if args.model
            else "give the checkpoint's value"
        )
        raise ValueError(
            f"--{name.replace('_', '-')} is {ours}, but the model in --load {args.load} has {theirs}; {hint}"
        )


def checkpoint_arguments(folder: str | None) -> Namespace:
    """The arguments kept in the newest checkpoint of a folder; empty when there is no torch_dist
    checkpoint."""
    tracker = Path(folder or "") / "latest_checkpointed_iteration.txt"
    if folder is None or not tracker.is_file():
        return Namespace()
    text = tracker.read_text().strip()
    newest = tracker.with_name(f"iter_{int(text):07d}" if text.isdecimal() else text)
    return common_state(newest).get("args", Namespace()) if (newest / ".metadata").is_file() else Namespace()


def common_state(folder: Path) -> dict:
    """Everything in a torch_dist checkpoint that is no tensor. Raises ValueError when the checkpoint is
    damaged."""
    try:
        return load_common_state_dict(str(folder))
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
    except (CheckpointingException, EOFError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        reason = error
    raise ValueError(f"{folder} is damaged ({reason}); copy it again")
