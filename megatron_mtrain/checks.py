"""Every check of a run's arguments, before a process group, a data set or a model exists.

`validate` reads nothing but the arguments and the files they name. Each refusal is one ValueError that names
the value, the rule and the way out.
"""

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import _IndexReader
from megatron.core.transformer.enums import AttnBackend
from megatron.training import get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from .config import AttentionConfig
from .layouts import make_layout
from .metadata import check_checkpoint

NO_PACKING = "packed (THD) sequences are not supported"
NO_GRAPHS = "CUDA graphs cannot hold an index that changes every step"
NO_LOGITS = "the largest attention logit is not recorded"
# destination -> (flag, why it cannot be used); refused when the value is true.
REFUSED = {
    "mtp_num_layers": ("--mtp-num-layers", "it shifts tokens as if they lay in zigzag order"),
    "sft": ("--sft", NO_PACKING),
    "rl_use_sequence_packing": ("--rl-use-sequence-packing", NO_PACKING),
    "reset_attention_mask": (
        "--reset-attention-mask",
        "--dataloader-inter-document-masking keeps documents apart",
    ),
    "hybrid_context_parallel": ("--hybrid-context-parallel", "context-parallel groups must not change"),
    "enable_cuda_graph": ("--enable-cuda-graph", NO_GRAPHS),
    "external_cuda_graph": ("--external-cuda-graph", NO_GRAPHS),
    "window_size": ("--window-size", "sliding windows are not supported"),
    "qk_clip": ("--qk-clip", NO_LOGITS),
    "log_max_attention_logit": ("--log-max-attention-logit", NO_LOGITS),
    "apply_query_key_layer_scaling": ("--apply-query-key-layer-scaling", "all layers scale alike"),
    "multi_latent_attention": ("--multi-latent-attention", "keys and values must have one size"),
    "experimental_attention_variant": ("--experimental-attention-variant", "--attn-type chooses it"),
    "heterogeneous_layers_config_path": ("--heterogeneous-layers-config-path", "all layers must be alike"),
    "hybrid_layer_pattern": ("--hybrid-layer-pattern", "this script trains transformer layers only"),
    "hybrid_override_pattern": ("--hybrid-override-pattern", "this script trains transformer layers only"),
    "spec": ("--spec", "this script makes the layer spec from --attn-type"),
    "yaml_cfg": ("--yaml-cfg", "arguments are read from the command line"),
    "perform_rl_step": ("--perform-rl-step", "this script only pre-trains"),
}


def attention_config(args: Namespace) -> AttentionConfig:
    """The attention that the arguments ask for. Raises ValueError for an unknown name, value or file."""
    config = AttentionConfig.from_yaml(args.attn_type, args.train_attn_config)
    given = {
        "implementation": args.attn_implementation,
        "backend": args.attn_kernels,
        "reuse": args.attn_reuse,
        "ring_comm": args.ring_comm,
    }
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def validate(args: Namespace) -> AttentionConfig:
    """Checks parsed arguments and returns their attention. Raises ValueError with value, rule and way out."""
    attention = attention_config(args)
    check_refused(args)
    _check_positions(args)
    check_documents(args)
    _check_required(args)
    _check_parallel(args, attention)
    _check_heads(args)
    if args.num_layers is not None and args.num_attention_heads is not None:
        attention.check_model(num_layers=args.num_layers, num_heads=args.num_attention_heads)
    _check_dataset(args)
    check_checkpoint(args.load, args.ckpt_step)
    check_checkpoint(args.pretrained_checkpoint)
    return attention


def check_refused(args) -> None:
    """Raises ValueError for a setting that cannot be honoured, in arguments or in a TransformerConfig."""
    for name, (flag, reason) in REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise ValueError(
                f"{flag}{'' if value is True else f' {value}'} cannot be used: {reason}; leave it out"
            )
    if args.attention_dropout > 0:
        raise ValueError(
            f"--attention-dropout {args.attention_dropout} cannot be used: attention has no dropout; set 0"
        )
    if args.cuda_graph_impl != "none":
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} cannot be used: {NO_GRAPHS}; leave it out"
        )
    if args.attention_backend == AttnBackend.local:
        raise ValueError("--attention-backend local would replace what --attn-type chooses; leave it out")
    if args.softmax_type != "vanilla":
        raise ValueError(f"--softmax-type {args.softmax_type} cannot be used: only vanilla can; leave it out")


def _check_positions(args: Namespace) -> None:
    kind, factor = args.position_embedding_type, args.rotary_scaling_factor
    if kind in ("mrope", "relative"):
        raise ValueError(f"--position-embedding-type {kind} cannot follow a token layout; use rope or yarn")
    if kind == "yarn" and factor <= 1:
        raise ValueError(
            f"--rotary-scaling-factor {factor} does not extend positions as YaRN does; give new length / "
            f"{args.yarn_original_max_position_embeddings}"
        )


def check_documents(args: Namespace) -> None:
    """What --dataloader-inter-document-masking, and positions that restart with it, cannot run with."""
    flag = "--dataloader-inter-document-masking"
    if not args.dataloader_inter_document_masking:
        if args.reset_position_ids:
            raise ValueError(
                f"--reset-position-ids restarts positions where documents are kept apart; add {flag}"
            )
        return
    if args.iterations_to_skip:
        raise ValueError(
            f"--iterations-to-skip {' '.join(map(str, args.iterations_to_skip))} cannot run with {flag}: "
            "Megatron would read the skipped batches as packed ones; leave one out"
        )
    if args.reset_position_ids and args.micro_batch_size > 1 and args.apply_rope_fusion:
        raise ValueError(
            f"--reset-position-ids with --micro-batch-size {args.micro_batch_size} gives every sequence "
            "rotary positions of its own, which fused RoPE cannot take; add --no-rope-fusion, or use "
            "--micro-batch-size 1"
        )


def _check_required(args: Namespace) -> None:
    for name in ("seq_length", "lr"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing; give its value")
    if args.train_iters is None and args.train_samples is None:
        raise ValueError("--train-iters is missing; give the number of steps, or --train-samples")
    if args.async_save and not args.use_persistent_ckpt_worker:
        raise ValueError(
            "--async-save alone would save synchronously; add --use-persistent-ckpt-worker, or leave it out"
        )
    for unit in ("iters", "samples"):
        warmup = getattr(args, f"lr_warmup_{unit}")
        decay = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
        if decay and warmup >= decay:
            raise ValueError(
                f"--lr-warmup-{unit} {warmup} must be less than the {decay} {unit} of learning-rate decay; "
                f"lower it, or raise --train-{unit}"
            )


def _check_parallel(args: Namespace, attention: AttentionConfig) -> None:
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    pipeline = args.pipeline_model_parallel_size
    model_size = tensor * pipeline * context
    if args.world_size % model_size:
        raise ValueError(
            f"{args.world_size} processes cannot be tensor {tensor} * pipeline {pipeline} * context {context}"
            f" = {model_size} ranks; start a multiple of {model_size} (torchrun --nproc-per-node)"
        )
    layout = make_layout(attention.layout, args.seq_length, context, attention.block_size)
    if args.sequence_parallel and layout.local_tokens % tensor:
        raise ValueError(
            f"{layout.local_tokens} tokens of a context-parallel rank cannot be split among {tensor} "
            "tensor-parallel ranks; leave out --sequence-parallel or change --seq-length"
        )
    _check_levels(args.hierarchical_context_parallel_sizes, context, needed=attention.two_level)


def _check_levels(sizes: list[int] | None, context: int, *, needed: bool) -> None:
    flag = "--hierarchical-context-parallel-sizes"
    if sizes and math.prod(sizes) != context:
        raise ValueError(
            f"{flag} {' '.join(map(str, sizes))} has product {math.prod(sizes)}; it must be the "
            f"--context-parallel-size, {context}"
        )
    if needed and context > 1 and len(sizes or []) != 2:
        raise ValueError(
            f"dr_stripe runs on two levels, got {sizes or 'none'}: give {flag} INNER OUTER with "
            f"INNER * OUTER = {context}, or use stripe"
        )


def _check_heads(args: Namespace) -> None:
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads and groups and heads % groups:
        raise ValueError(f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}")
    tensor = args.tensor_model_parallel_size
    for name, number in (("--num-attention-heads", heads), ("--num-query-groups", groups)):
        if number and number % tensor and tensor % number:
            raise ValueError(
                f"{name} {number} cannot be split among --tensor-model-parallel-size {tensor} ranks; choose "
                "one that divides it"
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
        raise ValueError(
            "no data set is named; give --data-path PREFIX (of PREFIX.bin and .idx), or --mock-data"
        )
    for file in (f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")):
        if "://" not in file and not Path(file).is_file():
            raise ValueError(
                f"data set file {file} does not exist; --data-path takes the path without .bin or .idx"
            )


def check_vocabulary(args: Namespace) -> None:
    """Raises ValueError when the tokenizer or the data has a token that the model's embedding has not."""
    tokenizer_size = get_tokenizer().vocab_size
    size = args.vocab_size or tokenizer_size
    if tokenizer_size > size:
        raise ValueError(
            f"--vocab-size {size} is smaller than the tokenizer's {tokenizer_size}; give at least that"
        )
    for prefix in [] if args.mock_data else dataset_prefixes(args):
        if "://" in prefix:
            continue
        tokens = np.memmap(f"{prefix}.bin", dtype=_checked_index(prefix).dtype, mode="r")
        largest = int(tokens[: 1 << 22].max(initial=0))  # a part that is read in no time
        if largest >= size:
            raise ValueError(
                f"data set {prefix} has token {largest}; a vocabulary of {size} ends at {size - 1}. Give the "
                "tokenizer that wrote it, or a larger --vocab-size"
            )


def _checked_index(prefix: str):
    """Megatron's index of a data set. Raises ValueError when it is damaged, or the .bin too short for it.

    Without this check a short file ends a run with a bus error, when its first missing page is read.
    """
    try:
        index = _IndexReader(f"{prefix}.idx", multimodal=False)
        ends = index.sequence_pointers + index.sequence_lengths.astype(np.int64) * index.dtype_size
        needed, first = int(ends.max(initial=0)), int(index.sequence_pointers.min(initial=0))
    except Exception as error:  # Megatron's reader fails in as many ways as a file can be damaged
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"data set index {prefix}.idx is damaged ({reason}); write it again") from None
    size = Path(f"{prefix}.bin").stat().st_size
    if not size or needed > size or first < 0:
        raise ValueError(
            f"data set file {prefix}.bin has {size} bytes, its index needs {needed}; the file is cut or of "
            "another data set, copy it again"
        )
    return index
