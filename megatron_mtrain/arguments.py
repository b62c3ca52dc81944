"""Command-line arguments of a run: the attention flags, and defaults with which a run starts."""

import importlib.util
import os
import sys
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.vocab_utils import calculate_padded_vocab_size

from . import chunked_mlp, offload, presets
from .checks import check_vocabulary, validate
from .config import AttentionConfig
from .cpu import CPU_DEFAULTS
from .validation import check_int


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
    """Kernels, over what the YAML file says: auto, or a name that must be able to run."""

    attn_reuse: str | None = None
    """With activation recomputation, what the second forward takes over: nothing, index (the default), or
    output (also the result, two tensors a layer: no second pass round the ring)."""

    ring_comm: str | None = None
    """How keys and values travel, over what the YAML file says: ring (hop by hop, the default), or allgather
    (all at once, for short rings on fast links)."""

    loss_chunk_size: int = 2048
    """Tokens whose logits exist at a time in the loss; 0: Megatron's own loss, all logits at once."""

    mlp_chunk_size: int = 0
    """Tokens whose feed-forward activations exist at a time, made again in the backward; 0: all."""

    offload_layer_inputs: bool = False
    """With full recompute, keep the input of every layer in host memory until its backward."""

    dry_run: int | None = None
    """Check the arguments for that many processes, say what they mean, and exit: no launcher, no GPU."""

    log_attention: bool = field(
        default=True,
        metadata={"argparse_meta": {"action": BooleanOptionalAction, "arg_names": ["--log-attention"]}},
    )
    """Tell density, recall, imbalance, tokens a second, MFU ... of every logged step (the default)."""

    log_ring_timing: bool = False
    """In logged steps, time what every step of the ring computes and waits, forward and backward."""


# Over Megatron's own defaults, by argparse destination: the Qwen2.5 family, and what long contexts need.
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
    # Else gradients are biased where loss masks differ between context-parallel ranks (Megatron-LM #7513).
    "calculate_per_token_loss": True,
    # The mask would be [N, N] (Megatron-LM #1025); this attention is causal by position.
    "create_attention_mask_in_dataloader": False,
    "micro_batch_size": 1,
    # Megatron's own default lets NaN pass in the first step after every start, into the weights.
    "rerun_mode": "disabled",
    # The default, nvrx, needs a package that Megatron does not bring along.
    "async_strategy": "mcore",
    "save_interval": 1000,
    # A checkpoint resumes on any number of tensor- and pipeline-parallel ranks, optimizer state included.
    "dist_ckpt_optim_fully_reshardable": True,
    "eval_interval": 1000,
}


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the attention flags to Megatron's parser and sets the defaults for this run and this machine."""
    ArgumentGroupFactory(AttentionArguments).build_group(parser, title="sparse attention")
    parser.set_defaults(**RUN_DEFAULTS, **machine_defaults())
    presets.add_arguments(parser)
    return parser


def machine_defaults() -> dict:
    """Megatron's arguments by destination without which it does not start on this machine."""
    if not torch.cuda.is_available():
        return CPU_DEFAULTS
    fused = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    defaults = {"gradient_accumulation_fusion": fused}
    if not HAVE_TE:
        defaults |= {"transformer_impl": "local", "no_persist_layer_norm": True, "apply_rope_fusion": False}
    return defaults


def parse_arguments() -> tuple[Namespace, AttentionConfig]:
    """The arguments of this run, checked by `validate` and by Megatron, and its attention."""
    # Megatron asks for it when tensor or context parallelism runs on a GPU before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" not in os.environ:  # one process, started without a launcher; port 0 is any free one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    args = parse_args(add_arguments)
    if args.dry_run is not None:
        check_int("--dry-run", args.dry_run, 1)
        os.environ["WORLD_SIZE"] = str(args.dry_run)
        sys.argv += ["--tensorboard-dir", "", "--wandb-project", ""]  # their writers would leave files
        args.world_size = args.dry_run
    attention = validate(args)
    args = parse_and_validate_args(add_arguments, args_defaults=_derived_defaults(args))
    for feature in (presets, chunked_mlp, offload):
        feature.check(args)
    check_vocabulary(args)
    return args, attention


def _derived_defaults(args: Namespace) -> dict:
    defaults = {"max_position_embeddings": args.seq_length}
    if args.vocab_size is not None:
        defaults["padded_vocab_size"] = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
        )
    return defaults


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the process with one line on stderr and exit code 1 when what is inside refuses the arguments."""
    try:
        yield
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        if not str(error):  # an assertion of Megatron without a message: only its place says what is wrong
            raise
        message = " ".join(str(error).split())
    else:
        return
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        # Rank 0 meets almost every error too, prints it and ends; meanwhile the launcher ends this process.
        time.sleep(20)
        message = f"rank {rank}: {message}"
    sys.exit(f"{Path(sys.argv[0]).name}: error: {message}")
