"""One table of names: which tensors of Hugging Face's Qwen make up which tensor of a Megatron checkpoint.

Both directions read it. Megatron's local and Transformer Engine layers have these same keys; tensors of the
layers are stacked, so a key of a layer holds [layers, ...]. Keys whose tensors join several of Hugging
Face's:

    self_attention.linear_qkv   for each key head its query heads, then its key, then its value:
                                [q0 q1 k0 v0 | q2 q3 k1 v1] for 4 query heads and 2 key heads
    mlp.linear_fc1              gate over up

Legend: h hidden size, f feed-forward size, d head dim, n query heads, g key heads, v vocabulary entries.
"""

from dataclasses import dataclass

import torch

from megatron_mtrain.qwen_shape import QwenShape

# Objects that layers of Transformer Engine keep for fp8; empty without it. Its layers ask for them when
# loading, and local layers for the first four.
STATES_OF_LAYER = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.core_attention",
)
LAYERS = "decoder.layers."


@dataclass(frozen=True)
class Row:
    """A Megatron tensor, and the Hugging Face tensors it is made of, joined along their first dimension."""

    megatron: str
    hf: tuple[str, ...]  # with {layer} for tensors of a layer
    shapes: tuple[tuple[int, ...], ...]  # of each Hugging Face tensor
    groups: int = 1  # key heads among which the rows are interleaved

    @property
    def per_layer(self) -> bool:
        """Whether each layer has its own, stacked in Megatron's."""
        return self.megatron.startswith(LAYERS)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of Megatron's tensor, of one layer."""
        return sum(shape[0] for shape in self.shapes), *self.shapes[0][1:]

    def hf_names(self, layer: int) -> list[str]:
        """The Hugging Face names in one layer."""
        return [name.format(layer=layer) for name in self.hf]

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Megatron's tensor of one layer."""
        if len(tensors) == 1:
            return tensors[0]
        parts = [tensor.unflatten(0, (self.groups, -1)) for tensor in tensors]
        return torch.cat(parts, 1).flatten(0, 1)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The Hugging Face tensors of one layer."""
        if len(self.shapes) == 1:
            return [tensor]
        sizes = [shape[0] // self.groups for shape in self.shapes]
        parts = tensor.unflatten(0, (self.groups, -1)).split(sizes, 1)
        return [part.flatten(0, 1) for part in parts]


def table(shape: QwenShape) -> list[Row]:
    """Every tensor of a model of this shape, in the order in which it is written."""
    h, f, d, v = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim, shape.vocab_size
    n, g = shape.num_heads, shape.num_groups
    qkv = ((n * d,), (g * d,), (g * d,))
    rows = [
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ((v, h),)),
        _row("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (h,)),
        _row("self_attention.linear_qkv.weight", QKV_WEIGHT, *((*size, h) for size in qkv), groups=g),
    ]
    if shape.qkv_bias:
        rows.append(_row("self_attention.linear_qkv.bias", QKV_BIAS, *qkv, groups=g))
    if shape.qk_norm:
        rows.append(_row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", (d,)))
        rows.append(_row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", (d,)))
    rows += [
        _row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (h, n * d)),
        _row("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", (h,)),
        _row("mlp.linear_fc1.weight", "mlp.gate_proj.weight mlp.up_proj.weight", (f, h), (f, h)),
        _row("mlp.linear_fc2.weight", "mlp.down_proj.weight", (h, f)),
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), ((h,),)),
    ]
    if not shape.tied:
        rows.append(Row("output_layer.weight", ("lm_head.weight",), ((v, h),)))
    return rows


QKV_WEIGHT = "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight"
QKV_BIAS = QKV_WEIGHT.replace("weight", "bias")


def _row(megatron: str, hf: str, *shapes: tuple[int, ...], groups: int = 1) -> Row:
    names = tuple(f"model.layers.{{layer}}.{name}" for name in hf.split())
    return Row(f"{LAYERS}{megatron}", names, shapes, groups)


def extra_states(shape: QwenShape) -> list[tuple[str, int, int]]:
    """(key, layer, number of layers) of every empty extra state that a checkpoint should hold."""
    layers = range(shape.num_layers)
    found = [(f"{LAYERS}{name}._extra_state", i, len(layers)) for name in STATES_OF_LAYER for i in layers]
    return [*found, ("decoder.final_layernorm._extra_state", 0, 1)]
