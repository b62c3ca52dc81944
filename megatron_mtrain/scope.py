"""--trainable: train the parameters whose names match, freeze the others.

A frozen parameter has no gradient, no float32 copy and no optimizer state. The names are those of the
checkpoint, such as decoder.layers.self_attention.linear_qkv.weight: a parameter of the layers is trained in
all of them or in none, because the checkpoint keeps the optimizer state of all layers as one tensor."""

import re
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from .arguments import one_line_errors

EXAMPLES = (
    "self_attention (all of attention), linear_qkv (projections to query, key and value), linear_proj, mlp, "
    "layernorm, embedding, output_layer; layers have no numbers"
)
# Transformer Engine keeps these norms in the linear layers after them; one pattern has to mean one thing.
ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def train_only(model_config, patterns: list[str] | None) -> None:
    """Makes a Megatron GPTModelConfig freeze every parameter that no regular expression of `patterns` finds.

    Does nothing without patterns. Raises ValueError for one that is no regular expression.
    """
    if not patterns:
        return
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"--trainable {pattern} is no regular expression ({error}); examples: {EXAMPLES}"
            ) from None
    model_config.pre_wrap_hooks.append(partial(_freeze_or_exit, patterns=patterns))


def _freeze_or_exit(models: list, patterns: list[str]) -> list:
    with one_line_errors():  # Megatron calls this, long after the arguments were checked
        return freeze_others(models, patterns)


def freeze_others(models: list, patterns: list[str]) -> list:
    """A pre-wrap hook: freezes what no pattern finds in the model chunks of this rank.

    Raises ValueError on every rank when a pattern finds nothing on any.
    """
    found = [0] * len(patterns)
    for name, param in names(models):
        matches = [bool(re.search(pattern, name)) for pattern in patterns]
        param.requires_grad_(any(matches))
        found = [count + match for count, match in zip(found, matches, strict=True)]
    for pattern, count in zip(patterns, _over_all_ranks(found), strict=True):
        if not count:
            raise ValueError(f"--trainable {pattern} matches no parameter; examples: {EXAMPLES}")
    for model in models:
        _keep_gradients_flowing(model)
    return models


def names(models: list) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter with its name, the same for local and Transformer Engine layers."""
    for model in models:
        for name, param in model.named_parameters():
            name = re.sub(r"\blayers\.\d+\.", "layers.", name)
            for fused, plain in ALIASES.items():
                name = name.replace(fused, plain)
            yield name, param


def _over_all_ranks(counts: list[int]) -> list[int]:
    """Sums over ranks: a pipeline stage without embedding is no reason to refuse a pattern for it."""
    if not dist.is_initialized():
        return counts
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    total = torch.tensor(counts, device=device)
    dist.all_reduce(total)
    return total.tolist()


def _keep_gradients_flowing(model) -> None:
    """Makes the output of a frozen embedding ask for a gradient.

    Recomputed layers run again only when their input asks for one: without it they would train nothing.
    """
    embedding = getattr(model, "embedding", None)
    if embedding is not None and not any(param.requires_grad for param in embedding.parameters()):
        embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module, inputs, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
