"""Command-line arguments of a run: the attention flags, defaults with which a run starts, and every check.

All that cannot work is refused here, from the arguments alone, before a process group, a data set or a model exists.
"""

import importlib.util
import math
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.enums import AttnBackend
from megatron.training import get_tokenizer
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.utils import get_blend_and_blend_per_split
from megatron.training.vocab_utils import calculate_padded_vocab_size

from .config import AttentionConfig
from .cpu import CPU_DEFAULTS
from .layouts import make_layout


@dataclass
class AttentionArguments:
    """Distributed dynamic sparse attention: what runs in place of Megatron's core attention."""

    attn_type: str = "dense"
    """Attention method: dense, zigzag_ring, stripe_ring, minfer, ... An unknown one lists them all."""

    train_attn_config: str | None = None
    """YAML file with the settings of the method: a path, or the name of a shipped file."""

    attn_implementation: str | None = None
    """Layout and ring, over what the YAML file says: zigzag, stripe, or dr_stripe (two-level ring)."""

    attn_kernels: str | None = None
    """Kernels that run the attention, over what the YAML file says: auto, or a name that must be able to run."""


# Over Megatron's own defaults, by argparse destination: the Qwen2.5 family, and what makes a run start and train right.
RUN_DEFAULTS = {
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "group_query_attention": True,
    "position_embedding_type": "rope",
    "rotary_base": 1_000_000,
    "yarn_original_max_position_embeddings": 32768,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    # Without it gradients are biased where loss masks differ between context-parallel ranks (Megatron-LM #7513).
    "calculate_per_token_loss": True,
    # The mask would be [N, N] (Megatron-LM #1025); this attention is causal by position.
    "create_attention_mask_in_dataloader": False,
    "micro_batch_size": 1,
    "save_interval": 1000,
    # A checkpoint resumes on any number of tensor- and pipeline-parallel ranks, optimizer state included.
    "dist_ckpt_optim_fully_reshardable": True,
    "eval_interval": 1000,
}

# destination -> (flag, why it cannot be used); refused when the value is true.
REFUSED = {
    "mtp_num_layers": ("--mtp-num-layers", "multi-token prediction shifts tokens as if they lay in zigzag order"),
    "sft": ("--sft", "packed (THD) sequences are not supported"),
    "dataloader_inter_document_masking": (
        "--dataloader-inter-document-masking",
        "packed (THD) sequences are not supported",
    ),
    "rl_use_sequence_packing": ("--rl-use-sequence-packing", "packed (THD) sequences are not supported"),
    "reset_attention_mask": ("--reset-attention-mask", "attention is causal over the whole sequence"),
    "reset_position_ids": ("--reset-position-ids", "rotary positions follow the whole sequence"),
    "hybrid_context_parallel": ("--hybrid-context-parallel", "the context-parallel groups must not change in a run"),
    "enable_cuda_graph": ("--enable-cuda-graph", "CUDA graphs cannot hold an index that changes every step"),
    "external_cuda_graph": ("--external-cuda-graph", "CUDA graphs cannot hold an index that changes every step"),
    "window_size": ("--window-size", "sliding windows are not supported"),
    "qk_clip": ("--qk-clip", "the largest attention logit is not recorded"),
    "log_max_attention_logit": ("--log-max-attention-logit", "the largest attention logit is not recorded"),
    "apply_query_key_layer_scaling": ("--apply-query-key-layer-scaling", "scores are scaled alike in every layer"),
    "multi_latent_attention": ("--multi-latent-attention", "keys and values must have one size"),
    "experimental_attention_variant": ("--experimental-attention-variant", "--attn-type chooses the attention"),
    "heterogeneous_layers_config_path": ("--heterogeneous-layers-config-path", "all layers must be alike"),
    "hybrid_layer_pattern": ("--hybrid-layer-pattern", "this script trains transformer layers only"),
    "hybrid_override_pattern": ("--hybrid-override-pattern", "this script trains transformer layers only"),
    "spec": ("--spec", "this script makes the layer spec from --attn-type"),
    "yaml_cfg": ("--yaml-cfg", "arguments are read from the command line"),
    "perform_rl_step": ("--perform-rl-step", "this script only pre-trains"),
}


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the attention flags to Megatron's parser and sets the defaults for this run and this machine."""
    ArgumentGroupFactory(AttentionArguments).build_group(parser, title="sparse attention")
    parser.set_defaults(**RUN_DEFAULTS, **_machine_defaults())
    return parser


def _machine_defaults() -> dict:
    if not torch.cuda.is_available():
        return CPU_DEFAULTS
    fused = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    defaults = {"gradient_accumulation_fusion": fused}
    if not HAVE_TE:
        defaults |= {"transformer_impl": "local", "no_persist_layer_norm": True, "apply_rope_fusion": False}
    return defaults


def parse_arguments() -> tuple[Namespace, AttentionConfig]:
    """The arguments of this run, checked by Megatron and by `validate`, and its attention.

    Ends the process with one message on stderr and exit code 1 when something cannot work.
    """
    # Megatron asks for it when tensor or context parallelism runs on a GPU before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        args = parse_args(add_arguments)
        attention = validate(args)
        args = parse_and_validate_args(add_arguments, args_defaults=_derived_defaults(args))
        check_vocabulary(args)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        if not str(error):
            raise
        _stop(" ".join(str(error).split()))
    return args, attention


def _derived_defaults(args: Namespace) -> dict:
    defaults = {"max_position_embeddings": args.seq_length}
    if args.vocab_size is not None:
        defaults["padded_vocab_size"] = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
        )
    return defaults


def _stop(message: str):
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        # Rank 0 meets almost every error too, prints it and ends; the launcher then ends this process in its wait.
        time.sleep(20)
        message = f"rank {rank}: {message}"
    sys.exit(f"{Path(sys.argv[0]).name}: error: {message}")


def attention_config(args: Namespace) -> AttentionConfig:
    """The attention that the arguments ask for. Raises ValueError for an unknown type, field, value or file."""
    config = AttentionConfig.from_yaml(args.attn_type, args.train_attn_config)
    given = {"implementation": args.attn_implementation, "backend": args.attn_kernels}
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def validate(args: Namespace) -> AttentionConfig:
    """Checks parsed arguments and returns their attention. Raises ValueError with value, rule and way out."""
    attention = attention_config(args)
    _check_refused(args)
    _check_required(args)
    _check_parallel(args, attention)
    if args.num_layers is not None and args.num_attention_heads is not None:
        attention.check_model(num_layers=args.num_layers, num_heads=args.num_attention_heads)
    _check_dataset(args)
    return attention


def _check_refused(args: Namespace) -> None:
    for name, (flag, reason) in REFUSED.items():
        value = getattr(args, name, None)
        if value:
            shown = "" if value is True else f" {value}"
            raise ValueError(f"{flag}{shown} cannot be used: {reason}; leave it out")
    if args.attention_dropout > 0:
        raise ValueError(
            f"--attention-dropout {args.attention_dropout} cannot be used: attention has no dropout; set 0"
        )
    if args.cuda_graph_impl != "none":
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} cannot be used: CUDA graphs cannot hold an index that changes "
            "every step; leave it out"
        )
    if args.attention_backend == AttnBackend.local:
        raise ValueError("--attention-backend local would replace --attn-type; leave it out")
    if args.softmax_type != "vanilla":
        raise ValueError(f"--softmax-type {args.softmax_type} cannot be used: only vanilla is; leave it out")
    if args.position_embedding_type in ("mrope", "relative"):
        raise ValueError(
            f"--position-embedding-type {args.position_embedding_type} cannot follow a token layout; use rope or yarn"
        )
    if args.position_embedding_type == "yarn" and args.rotary_scaling_factor <= 1:
        raise ValueError(
            f"--rotary-scaling-factor {args.rotary_scaling_factor} does not extend YaRN; give new length / "
            f"{args.yarn_original_max_position_embeddings or RUN_DEFAULTS['yarn_original_max_position_embeddings']}"
        )


def _check_required(args: Namespace) -> None:
    for name in ("seq_length", "lr"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing; give its value")
    if args.train_iters is None and args.train_samples is None:
        raise ValueError("--train-iters is missing; give the number of steps, or --train-samples")


def _check_parallel(args: Namespace, attention: AttentionConfig) -> None:
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    model_size = tensor * context * args.pipeline_model_parallel_size
    if args.world_size % model_size:
        raise ValueError(
            f"{args.world_size} processes cannot run tensor {tensor} * pipeline {args.pipeline_model_parallel_size} * "
            f"context {context} = {model_size} ranks; start a multiple of {model_size} (torchrun --nproc-per-node)"
        )
    layout = make_layout(attention.layout, args.seq_length, context, attention.block_size)
    if args.sequence_parallel and layout.local_tokens % tensor:
        raise ValueError(
            f"{layout.local_tokens} tokens of a context-parallel rank cannot be split among {tensor} tensor-parallel "
            "ranks; leave out --sequence-parallel or change --seq-length"
        )
    levels = args.hierarchical_context_parallel_sizes
    if levels and math.prod(levels) != context:
        raise ValueError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, levels))} has product {math.prod(levels)}; "
            f"it must be --context-parallel-size {context}"
        )
    if attention.two_level and context > 1 and (not levels or len(levels) != 2):
        raise ValueError(
            f"dr_stripe needs two levels, got {levels or 'none'}: give --hierarchical-context-parallel-sizes INNER "
            f"OUTER with INNER * OUTER = {context}, or use stripe"
        )


def dataset_prefixes(args: Namespace) -> list[str]:
    """The path prefixes of all indexed data sets named by the arguments, without duplicates."""
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [part for part in [blend, *(per_split or [])] if part is not None]
    return list(dict.fromkeys(prefix for prefixes, _weights in blends for prefix in prefixes))


def _check_dataset(args: Namespace) -> None:
    if args.mock_data:
        return
    prefixes = dataset_prefixes(args)
    if not prefixes:
        raise ValueError("no data set is named; give --data-path PREFIX (of PREFIX.bin and .idx), or --mock-data")
    for file in (f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")):
        if "://" not in file and not Path(file).is_file():
            raise ValueError(f"data set file {file} does not exist; --data-path takes the path without .bin or .idx")


def check_vocabulary(args: Namespace) -> None:
    """Raises ValueError when the tokenizer or the data has a token that the model's embedding has not."""
    tokenizer_size = get_tokenizer().vocab_size
    size = args.vocab_size or tokenizer_size
    if tokenizer_size > size:
        raise ValueError(f"--vocab-size {size} is smaller than the tokenizer's {tokenizer_size}; give at least that")
    for prefix in [] if args.mock_data else dataset_prefixes(args):
        if "://" in prefix:
            continue
        tokens = np.memmap(f"{prefix}.bin", dtype=IndexedDataset(prefix).index.dtype, mode="r")
        largest = int(tokens[: 1 << 22].max(initial=0))  # a part that is read in no time
        if largest >= size:
            raise ValueError(
                f"data set {prefix} has token {largest}; a vocabulary of {size} ends at {size - 1}. Give the tokenizer "
                "that wrote it, or a larger --vocab-size"
            )


ATTENTION_FLAGS = tuple(field.name for field in fields(AttentionArguments))
