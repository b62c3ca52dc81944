"""The model: Megatron's own GPT layer spec with its core_attention replaced by SparseRingAttention.

Used by pretrain_qwen.py, by a Megatron-Bridge provider (`transformer_layer_spec=partial(layer_spec,
attention=...)`) and by stock Megatron (`--spec megatron_mtrain.model layer_spec`, or a module of your own
with such a partial in it). Both deal tokens and rotary positions in zigzag order, so there every method runs
on the zigzag layout.
"""

import copy
import dataclasses
import functools

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.training.models.gpt import default_layer_spec

from .checks import check_refused
from .config import AttentionConfig
from .core_attention import SparseRingAttention
from .rope import use_layout_positions


def use_sparse_attention(model_config, attention: AttentionConfig) -> None:
    """Makes the model of a Megatron GPTModelConfig run `attention`, with rotary positions that follow its
    layout.

    The batch has to be in the same order: see batch.py.
    """
    attention.check_model(
        num_layers=model_config.transformer.num_layers, num_heads=model_config.transformer.num_attention_heads
    )
    spec = functools.partial(layer_spec, attention=attention, token_order=attention.layout)
    model_config.transformer_layer_spec = spec
    model_config.pre_wrap_hooks.append(functools.partial(use_layout_positions, attention=attention))


def layer_spec(
    cfg,
    vp_stage: int | None = None,
    *,
    attention: AttentionConfig | None = None,
    token_order: str = "zigzag",
):
    """Megatron's layer spec for `cfg` (GPTModelConfig, or a TransformerConfig) with sparse ring attention in
    it.

    Transformer Engine layers when it is installed and a GPU is there, Megatron's local layers otherwise; both
    have the same checkpoint keys. Without `attention`: exact attention. `token_order` is the layout in which
    batch and rotary positions come, zigzag in stock Megatron. Raises ValueError when attention has another
    one, which would silently attend the wrong tokens, and for settings of `cfg` that it cannot honour.
    """
    attention = attention or AttentionConfig.from_dict("zigzag_ring")
    transformer = getattr(cfg, "transformer", cfg)
    check_refused(transformer)
    if transformer.context_parallel_size > 1 and attention.layout != token_order:
        raise ValueError(
            f"attention on the {attention.layout} layout does not fit tokens in {token_order} order; set "
            f"implementation {token_order}, or deal batch and rotary positions as pretrain_qwen.py does"
        )
    if not (HAVE_TE and torch.cuda.is_available()):
        transformer.transformer_impl = "local"
    spec = default_layer_spec(cfg, vp_stage) if transformer is not cfg else _plain_layer_spec(transformer)
    if transformer.transformer_impl == "local" and transformer.normalization == "RMSNorm":
        spec = _local_block_spec(spec, transformer, vp_stage)
    return replace_core_attention(spec, attention)


def replace_core_attention(spec, attention: AttentionConfig):
    """A copy of a layer spec, block spec or hybrid stack spec whose self attention runs `attention`.

    Raises ValueError when there is no core_attention in it to replace.
    """
    replaced = _replaced(spec, ModuleSpec(module=SparseRingAttention, params={"attention": attention}))
    if replaced is spec:
        raise ValueError(f"no core_attention to replace in {spec!r}; give a spec with self-attention layers")
    return replaced


def _replaced(node, core: ModuleSpec):
    """A copy of `node` with `core` for every plain core_attention below it; `node` itself when there is
    none."""
    if isinstance(node, functools.partial):
        inside = node.keywords.get("submodules")
        found = _replaced(inside, core)
        return node if found is inside else functools.partial(node, submodules=found)
    if isinstance(node, list | tuple):
        found = [_replaced(child, core) for child in node]
        return node if all(new is old for new, old in zip(found, node, strict=True)) else type(node)(found)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node
    if hasattr(node, "core_attention"):
        # Latent attention has another contract (its keys and values differ in size) and no linear_qkv.
        changed = {"core_attention": core} if hasattr(node, "linear_qkv") else {}
    else:
        names = ["submodules"] if isinstance(node, ModuleSpec) else [f.name for f in dataclasses.fields(node)]
        found = {name: _replaced(getattr(node, name), core) for name in names}
        changed = {name: new for name, new in found.items() if new is not getattr(node, name)}
    if not changed:
        return node
    copied = copy.copy(node)
    for name, new in changed.items():
        setattr(copied, name, new)
    return copied


def _plain_layer_spec(transformer) -> ModuleSpec:
    if transformer.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=transformer.qk_layernorm)
    return get_gpt_layer_local_spec(
        qk_layernorm=transformer.qk_layernorm, normalization=transformer.normalization
    )


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm for Megatron's local layers, with sequence parallelism, which Megatron's own wrapper
    refuses.

    Each tensor-parallel rank normalises its own tokens, so the gradient of the weight has to be summed over
    ranks; Megatron does that for parameters that carry `sequence_parallel`.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class RMSNormWithState(RMSNorm):
    """RMSNorm with an empty extra state, as Transformer Engine's norms save one: either loads the other's.

    For norms that are modules of their own in both layer specs: the final one, and those of query and key.
    """

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        """Nothing is kept."""


def _local_block_spec(spec, transformer, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The local layer spec as a block spec, the only place where the final norm can be named."""
    if isinstance(spec, TransformerBlockSubmodules):
        layers = spec.layer_specs
    else:
        layers = [spec] * get_num_layers_to_build(transformer, vp_stage)
    for layer in layers:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if transformer.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNormWithState
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNormWithState)
