"""The seams with Megatron, one by one and without a training run: rotary positions, batch, layer spec,
groups."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_mtrain import AttentionConfig, make_layout
from megatron_mtrain.batch import FIELDS, next_batch, slice_batch
from megatron_mtrain.core_attention import SparseRingAttention, attention_rings
from megatron_mtrain.model import RMSNorm, layer_spec, replace_core_attention
from megatron_mtrain.rope import rotary_forward

TOKENS, BLOCK, HEAD = 512, 32, 16


class Group:
    """What the glue asks a process group."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = (lambda: rank), (lambda: size)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)


def attention(implementation: str = "stripe", attn_type: str = "dense") -> AttentionConfig:
    return AttentionConfig.from_dict(attn_type, {"implementation": implementation, "block_size": BLOCK})


def plain_rope() -> RotaryEmbedding:
    return RotaryEmbedding(
        HEAD, 1.0, rotary_base=1_000_000, use_cpu_initialization=True, cp_group=Group(0, 1)
    )


def yarn(factor: float, original: int) -> YarnRotaryEmbedding:
    return YarnRotaryEmbedding(
        HEAD,
        rotary_base=1_000_000,
        scaling_factor=factor,
        original_max_position_embeddings=original,
        use_cpu_initialization=True,
        cp_group=Group(0, 1),
    )


@pytest.mark.parametrize("implementation", ["zigzag", "stripe", "dr_stripe"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_plain_rotary_angles(implementation, world_size):
    frequency = 1_000_000.0 ** -(torch.arange(0, HEAD, 2).double() / HEAD)
    config = attention(implementation)
    layout = make_layout(config.layout, TOKENS, world_size, BLOCK)
    for rank in range(world_size):
        angles = rotary_forward(plain_rope(), config, Group(rank, world_size))(TOKENS)
        assert angles.shape == (TOKENS // world_size, 1, 1, HEAD)
        assert angles.dtype == torch.float32
        expected = layout.positions(rank).double()[:, None] * frequency
        torch.testing.assert_close(
            angles[:, 0, 0].double(), torch.cat([expected, expected], 1), rtol=1e-6, atol=0
        )


def test_yarn_angles_equal_transformers():
    """Frequencies and attention factor of Qwen2.5's YaRN, 4x, against the ones of transformers."""
    original, factor = 32768, 4.0
    config = Qwen2Config(
        hidden_size=HEAD * 4,
        num_attention_heads=4,
        max_position_embeddings=int(original * factor),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": factor,
            "original_max_position_embeddings": original,
        },
    )
    frequency, expected_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    angles, attention_factor = rotary_forward(yarn(factor, original), attention(), Group(1, 4))(TOKENS)
    expected = make_layout("stripe", TOKENS, 4, BLOCK).positions(1)[:, None] * frequency
    torch.testing.assert_close(angles[:, 0, 0], torch.cat([expected, expected], 1), rtol=1e-5, atol=1e-6)
    assert attention_factor == pytest.approx(expected_factor)


def test_rotary_refuses_packed_sequences():
    with pytest.raises(ValueError, match="packed"):
        rotary_forward(plain_rope(), attention(), Group(0, 1))(TOKENS, packed_seq=True)


@pytest.mark.parametrize("implementation", ["zigzag", "stripe"])
def test_batch_holds_every_token_once_and_its_label(implementation):
    world_size, whole = (
        4,
        {name: torch.arange(2 * TOKENS).view(2, TOKENS) + n for n, name in enumerate(FIELDS)},
    )
    parts = [slice_batch(whole, attention(implementation), rank, world_size) for rank in range(world_size)]
    layout = make_layout(implementation, TOKENS, world_size, BLOCK)
    for name in FIELDS:
        assert torch.equal(layout.unshard([part[name] for part in parts], 1), whole[name])
    assert torch.equal(parts[3]["position_ids"][0] - 3, layout.positions(3))


def test_batch_of_a_middle_stage_is_empty():
    assert set(next_batch(None, attention(), Group(0, 2)).values()) == {None}


def test_batch_refuses_a_sequence_that_cannot_be_dealt():
    with pytest.raises(ValueError, match="500"):
        slice_batch({name: torch.zeros(1, 500) for name in FIELDS}, attention(), 0, 2)


def core_attention_of(layer):
    return layer.submodules.self_attention.submodules.core_attention


def test_layer_spec_is_replaced_in_a_copy():
    spec = get_gpt_layer_local_spec()
    core = core_attention_of(replace_core_attention(spec, attention()))
    assert core.module is SparseRingAttention
    assert core.params == {"attention": attention()}
    assert core_attention_of(spec) is DotProductAttention


def test_block_spec_is_replaced_in_every_layer():
    block = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec() for _ in range(3)])
    replaced = replace_core_attention(block, attention())
    assert [core_attention_of(layer).module for layer in replaced.layer_specs] == [SparseRingAttention] * 3


def test_hybrid_stack_is_replaced_where_attention_is_plain():
    replaced = replace_core_attention(hybrid_stack_spec, attention()).submodules
    assert core_attention_of(replaced.attention_layer).module is SparseRingAttention
    for latent in ("mla_layer", "dsa_layer"):
        assert (
            getattr(core_attention_of(getattr(replaced, latent)), "module", None) is not SparseRingAttention
        )


def test_spec_without_attention_is_refused():
    with pytest.raises(ValueError, match="core_attention"):
        replace_core_attention(TransformerBlockSubmodules(layer_specs=[]), attention())


def transformer(**settings) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        **{"attention_dropout": 0.0} | settings,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the spec may be Transformer Engine's")
def test_stock_layer_spec_is_exact_and_zigzag():
    """`--spec megatron_mtrain.model layer_spec`: stock Megatron deals tokens in zigzag order."""
    block = layer_spec(SimpleNamespace(transformer=transformer(), restore_modelopt_state=False))
    assert len(block.layer_specs) == 2
    assert issubclass(block.layer_norm, RMSNorm)
    used = core_attention_of(block.layer_specs[0]).params["attention"]
    assert (used.attn_type, used.layout) == ("zigzag_ring", "zigzag")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the spec may be Transformer Engine's")
def test_bare_transformer_config_is_enough():
    spec = functools.partial(layer_spec, attention=attention())(transformer(), vp_stage=None)
    assert core_attention_of(spec.layer_specs[1]).params == {"attention": attention()}


def test_layer_spec_refuses_tokens_in_another_order():
    config = transformer(context_parallel_size=2)
    layer_spec(config, attention=attention(), token_order="stripe")
    with pytest.raises(ValueError, match="stripe layout does not fit tokens in zigzag order"):
        layer_spec(config, attention=attention())


def test_layer_spec_refuses_what_attention_would_ignore():
    with pytest.raises(ValueError, match="attention-dropout 0.1 cannot be used"):
        layer_spec(transformer(attention_dropout=0.1))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_local_norm_carries_sequence_parallel(sequence_parallel):
    norm = RMSNorm(SimpleNamespace(sequence_parallel=sequence_parallel), 64, eps=1e-6)
    assert norm.weight.sequence_parallel is sequence_parallel


def test_rings_of_one_rank_need_no_group():
    assert attention_rings(None, 1, two_level=True) == []


@pytest.mark.parametrize(
    ("groups", "world_size", "two_level", "words"),
    [
        (SimpleNamespace(), 2, False, "--context-parallel-size"),
        (SimpleNamespace(cp=Group(0, 2)), 4, False, r"\[2\] do not make 4"),
        (SimpleNamespace(cp=Group(0, 4), hcp=None), 4, True, "--hierarchical-context-parallel-sizes"),
        (SimpleNamespace(hcp=[Group(0, 2), Group(0, 4)]), 4, True, r"\[2, 4\] do not make 4"),
        (SimpleNamespace(hcp=[Group(0, 4)]), 4, True, "on two levels"),
    ],
    ids=["no group", "small group", "no levels", "wrong product", "one level"],
)
def test_groups_that_do_not_fit(groups, world_size, two_level, words):
    with pytest.raises(ValueError, match=words):
        attention_rings(groups, world_size, two_level=two_level)


@pytest.fixture
def layer():
    module = SparseRingAttention(
        transformer(), layer_number=2, attention=attention(), pg_collection=SimpleNamespace()
    )
    assert (module.layer, list(module.parameters()), module.state_dict()) == (1, [], {})
    return module


def test_core_attention_contract(layer):
    """[s, b, h, d] in, [s, b, h * d] out, for strided values and fewer key heads than query heads."""
    query, both = torch.randn(64, 2, 4, HEAD), torch.randn(64, 2, 2, 2 * HEAD)
    key, value = both.split(HEAD, -1)
    out = layer(query, key, value, None, attn_mask_type=None)
    assert out.shape == (64, 2, 4 * HEAD)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.permute(1, 2, 0, 3) for t in (query, key, value)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.permute(2, 0, 1, 3).flatten(2), rtol=1e-4, atol=1e-5)


def test_core_attention_refuses_masks_and_packed_sequences(layer):
    query = torch.randn(64, 1, 4, HEAD)
    with pytest.raises(ValueError, match="mask"):
        layer(query, query, query, torch.ones(64, 64))
    with pytest.raises(ValueError, match="thd"):
        layer(query, query, query, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))


def test_cross_attention_is_refused():
    with pytest.raises(ValueError, match="'cross'"):
        SparseRingAttention(transformer(), 1, attention_type="cross", attention=attention())


@pytest.mark.parametrize(
    ("reuse", "built", "ran"), [("nothing", 4, 4), ("index", 2, 4), ("output", 2, 2)], ids=lambda x: str(x)
)
def test_recomputed_forward_takes_over_what_was_kept(monkeypatch, reuse, built, ran):
    """Two micro batches forward, then both again with gradients, as in a pipeline: in the same order."""
    import megatron_mtrain.attention as ring
    import megatron_mtrain.core_attention as core

    calls = []
    monkeypatch.setattr(core, "build_index", counted(calls, "built", core.build_index))
    forward = counted(calls, "ran", ring.ring_forward)
    monkeypatch.setattr(ring, "ring_forward", forward)
    monkeypatch.setattr(core, "ring_forward", forward)
    module = SparseRingAttention(
        transformer(recompute_granularity="selective"),
        layer_number=1,
        attention=replace(attention(), reuse=reuse),
        pg_collection=SimpleNamespace(),
    ).train()
    batches = [torch.randn(64, 1, 4, HEAD, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        first = [module(query, query, query) for query in batches]
    again = [module(query, query, query) for query in batches]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert (calls.count("built"), calls.count("ran"), len(module.kept)) == (built, ran, 0)
    plain = SparseRingAttention(transformer(), 1, attention=attention(), pg_collection=SimpleNamespace())
    for query, out in zip(batches, again, strict=True):
        expected = torch.autograd.grad(plain(query, query, query).square().sum(), query)
        assert torch.equal(torch.autograd.grad(out.square().sum(), query)[0], expected[0])


def counted(calls: list, name: str, function):
    """`function`, noting its name in `calls`."""

    def call(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    return call
