"""--dry-run: what a run would do, said before any process group, data set or model exists."""

from argparse import Namespace

from . import yarn
from .config import AttentionConfig


def plan(args: Namespace, attention: AttentionConfig) -> str:
    """A run's checked arguments in a few lines: model, ranks, tokens, attention, batch."""
    context, data = args.context_parallel_size, args.data_parallel_size
    split = f"tensor {args.tensor_model_parallel_size} * pipeline {args.pipeline_model_parallel_size}"
    heads = f"{args.num_attention_heads} heads, {args.num_query_groups} key heads"
    scaling = yarn.from_arguments(args)
    reach = f"; YaRN from {scaling.original} to {scaling.reach}" if scaling else ""
    micro_batches = args.global_batch_size // (args.micro_batch_size * data)
    ring = " x ".join(map(str, rings(args, attention)))
    rows = {
        "model": f"{args.num_layers} layers, hidden size {args.hidden_size}, {heads}, "
        f"vocabulary {args.padded_vocab_size}",
        "ranks": f"{args.world_size} = {split} * context {context} * data {data}",
        "tokens": f"{args.seq_length} a sequence, {args.seq_length // context} of them on a rank{reach}",
        "batch": f"{args.global_batch_size} sequences a step, {micro_batches} micro batches of "
        f"{args.micro_batch_size} on each rank",
        "attention": f"{attention.attn_type} on {attention.implementation}, rings of {ring}",
        "settings": ", ".join(attention.to_yaml().splitlines()),
    }
    return "".join(f"{name:10}{text}\n" for name, text in rows.items())


def rings(args: Namespace, attention: AttentionConfig) -> list[int]:
    """Ranks of each ring that keys and values travel, inner to outer."""
    levels = args.hierarchical_context_parallel_sizes
    return levels if attention.two_level and levels else [args.context_parallel_size]
