"""--trainable: train the parameters whose names match, freeze the others.

A frozen parameter has no gradient, no float32 copy and no optimizer state. The names are those of the
checkpoint, such as decoder.layers.self_attention.linear_qkv.weight: a parameter of the layers is trained in
all of them or in none, because the checkpoint keeps the optimizer state of all layers as one tensor."""

import re
from functools import partial

import torch
import torch.distributed as dist
from megatron.training import get_args

from .arguments import one_line_errors

QKV = ("query", "key", "value")  # how the joined projection is laid out, for each key head
EXAMPLES = (
    "self_attention (all of attention), linear_qkv (projections to query, key and value), "
    r"linear_qkv\.(query|key) (two of them), linear_proj, mlp, layernorm, embedding, output_layer; layers "
    "have no numbers"
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
        return freeze_others(models, patterns, weight_decay=get_args().weight_decay)


def freeze_others(models: list, patterns: list[str], *, weight_decay: float = 0.0) -> list:
    """A pre-wrap hook: freezes what no pattern finds in the model chunks of this rank.

    Raises ValueError on every rank when a pattern finds nothing on any, and when rows of a parameter should
    be frozen where that cannot be."""
    found = [0] * len(patterns)
    for model in models:
        tied = getattr(model, "share_embeddings_and_output_weights", False)
        for name, param in model.named_parameters():
            if tied and name == "output_layer.weight":  # the last pipeline stage's copy of the embedding
                name = "embedding.word_embeddings.weight"
            matches = [[bool(re.search(pattern, part)) for pattern in patterns] for part in names(name)]
            trained = [any(row) for row in matches]
            param.requires_grad_(any(trained))
            if any(trained) and not all(trained):
                _train_rows(param, trained, model, weight_decay)
            found = [
                count + sum(column) for count, column in zip(found, zip(*matches, strict=True), strict=True)
            ]
        _keep_gradients_flowing(model)
    for pattern, count in zip(patterns, _over_all_ranks(found), strict=True):
        if not count:
            raise ValueError(f"--trainable {pattern} matches no parameter; examples: {EXAMPLES}")
    return models


def names(name: str) -> list[str]:
    """What patterns see of a parameter of Megatron's model: one name, or three for the joined q, k and v."""
    name = re.sub(r"\blayers\.\d+\.", "layers.", name)
    for fused, plain in ALIASES.items():
        name = name.replace(fused, plain)
    before, joined, kind = name.partition("linear_qkv.")
    return [f"{before}{joined}{part}.{kind}" for part in QKV] if joined else [name]


def _train_rows(param: torch.nn.Parameter, trained: list[bool], model, weight_decay: float) -> None:
    """Keeps at zero the gradient of those rows of a joined q, k, v projection that are not trained.

    Their optimizer state stays zero with it, so they do not move; weight decay alone would move them.
    """
    config, ranks = model.config, model.pg_collection.tp
    if weight_decay or config.gradient_accumulation_fusion:
        raise ValueError(
            "--trainable selects a part of the joined q, k, v projection, which needs --weight-decay 0 and "
            f"--no-gradient-accumulation-fusion; got --weight-decay {weight_decay:g} and that fusion "
            f"{'on' if config.gradient_accumulation_fusion else 'off'}"
        )
    heads, size = config.num_attention_heads, config.kv_channels
    # From the tensor: Megatron rewrites the number of key heads in its config when there are fewer than
    # ranks.
    groups = (len(param) * ranks.size() // size - heads) // 2
    share = heads // groups
    head = (torch.arange(len(param)) + ranks.rank() * len(param)) // size % (share + 2)
    mask = torch.tensor(trained)[(head - share + 1).clamp(min=0)]
    mask = mask.view(-1, *[1] * (param.dim() - 1))

    def keep(grad: torch.Tensor) -> torch.Tensor:
        nonlocal mask
        mask = mask.to(grad.device, grad.dtype)  # once: then it is there
        return grad * mask

    param.register_hook(keep)


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
