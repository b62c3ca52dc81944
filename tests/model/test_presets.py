"""--model and --rope-scaling: every size from the model, explicit flags first, YaRN as in transformers."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.training.arguments import parse_args
from transformers import Qwen2Config, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from megatron_mtrain import arguments, presets, qwen_shape, yarn
from tools.checkpoint.names import table

# Parameters that the model cards give, without a second copy of tied embeddings.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.fixture
def parse(monkeypatch):
    """Parses flags as pretrain_qwen.py does."""

    def parse_flags(*flags):
        monkeypatch.setattr(sys, "argv", ["pretrain_qwen.py", *map(str, flags)])
        return parse_args(arguments.add_arguments)

    return parse_flags


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder of a small Qwen3."""
    config = Qwen3Config(
        vocab_size=503,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    )
    config.save_pretrained(tmp_path)
    return tmp_path


def test_every_preset_has_its_parameters():
    assert set(PARAMETERS) == set(presets.NAMES)
    for name, expected in PARAMETERS.items():
        shape = presets.model_shape(name)
        rows = table(shape)
        total = sum(math.prod(row.shape) * (shape.num_layers if row.per_layer else 1) for row in rows)
        assert total == expected, name


def test_named_model_fills_the_flags(parse):
    args = parse("--model", "Qwen2.5-3B")
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size) == (36, 2048, 11008)
    assert (args.num_attention_heads, args.num_query_groups, args.kv_channels) == (16, 2, 128)
    assert (args.vocab_size, args.make_vocab_size_divisible_by) == (151936, 128)
    assert (args.add_qkv_bias, args.qk_layernorm) == (True, False)
    assert args.untie_embeddings_and_output_weights is False
    assert (args.rotary_base, args.position_embedding_type) == (1_000_000, "rope")


def test_folder_fills_the_flags(parse, folder):
    args = parse("--model", folder)
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size) == (3, 64, 96)
    assert (args.num_attention_heads, args.num_query_groups, args.kv_channels) == (8, 2, 16)
    assert (args.vocab_size, args.layernorm_epsilon, args.rotary_base) == (503, 1e-5, 5_000_000)
    assert (args.add_qkv_bias, args.qk_layernorm) == (False, True)
    assert (args.tokenizer_type, args.tokenizer_model) == (None, None)


def test_folder_with_a_tokenizer(parse, folder):
    (folder / "tokenizer.json").write_text("{}")
    args = parse("--model", folder)
    assert (args.tokenizer_type, args.tokenizer_model) == ("HuggingFaceTokenizer", str(folder))
    assert parse("--model", folder, "--tokenizer-type", "NullTokenizer").tokenizer_model is None


def test_explicit_flags_win(parse, folder):
    args = parse("--num-layers", 2, "--model", folder, "--rotary-base", 10_000)
    assert (args.num_layers, args.rotary_base, args.hidden_size) == (2, 10_000, 64)


def test_without_a_model_nothing_changes(parse):
    assert parse().num_layers is None


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "divisor"),
    [(151936, 1, 128), (151936, 4, 32), (151936, 8, 16), (152064, 8, 64), (503, 1, 1), (503, 2, 4)],
)
def test_vocabulary_is_padded_least(vocabulary, ranks, divisor):
    assert presets.vocabulary_divisor(vocabulary, ranks) == divisor
    padded = -(-vocabulary // (divisor * ranks)) * divisor * ranks
    assert padded == -(-vocabulary // ranks) * ranks


def test_yarn_flags(parse, folder):
    args = parse("--model", "qwen2.5-0.5b", "--rope-scaling", "yarn:16")
    assert (args.position_embedding_type, args.rotary_scaling_factor) == ("yarn", 16)
    assert args.yarn_original_max_position_embeddings == 32768
    assert (args.yarn_beta_fast, args.yarn_beta_slow, args.mscale, args.mscale_all_dim) == (32, 1, 1, 0)
    assert parse("--rope-scaling", "yarn:4:8192").yarn_original_max_position_embeddings == 8192
    # No longer than what the model was made for.
    assert parse("--model", folder, "--rope-scaling", "yarn:4").yarn_original_max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model qwen2.5-4b", ["qwen2.5-4b", "folder", "qwen2.5-3b", "qwen3-4b"]),
        ("--rope-scaling linear:4", ["linear:4", "yarn:FACTOR"]),
        ("--rope-scaling yarn", ["yarn:FACTOR"]),
        ("--rope-scaling yarn:much", ["yarn:much", "number"]),
        ("--rope-scaling yarn:1", ["factor 1 ", "above 1"]),
        ("--rope-scaling yarn:4:0", ["original length 0"]),
    ],
)
def test_unknown_names(parse, flags, words):
    with pytest.raises(ValueError) as refused:
        parse(*flags.split())
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "flags",
    [
        "--position-embedding-type rope",
        "--rotary-scaling-factor 4",
        "--rope-scaling yarn:16:8192 --yarn-original-max-position-embeddings 4096",
    ],
)
def test_contradictions_of_scaling(parse, flags):
    args = parse("--model", "qwen2.5-0.5b", "--rope-scaling", "yarn:16", *flags.split())
    with pytest.raises(ValueError, match="contradicts --rope-scaling yarn:16"):
        presets.check(args)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-layers 2", ["--num-layers is 2", "has 4", "checkpoint's value"]),
        ("--vocab-size 128", ["--vocab-size is 128", "has 256"]),
        ("--model qwen3-0.6b", ["has 4", "--model"]),
    ],
)
def test_contradictions_of_a_checkpoint(runs, parse, flags, words):
    stored = presets.checkpoint_arguments(runs.initial)
    args = parse("--load", runs.initial, *flags.split())
    with pytest.raises(ValueError) as refused:
        presets.check(args)
    assert all(word in str(refused.value) for word in words), refused.value
    assert stored.num_layers == 4


def test_no_checkpoint_contradicts_nothing(parse, tmp_path):
    presets.check(parse("--load", tmp_path, "--model", "qwen2.5-0.5b"))


SCALINGS = {
    "512K": {"factor": 16.0, "original_max_position_embeddings": 32768},
    "short": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "other factor": {"factor": 8.0, "original_max_position_embeddings": 65536, "attention_factor": 1.5},
    "other ramp": {
        "factor": 16.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "scales": {
        "factor": 16.0,
        "original_max_position_embeddings": 32768,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
    },
}
POSITIONS = [0, 1, 127, 4095, 32767, 32768, 131071, 300_000, 524_287]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", SCALINGS)
def test_yarn_is_that_of_transformers(monkeypatch, case, head_dim):
    """cos and sin times the attention factor, to 512K tokens, in a model whose parameters are bfloat16."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, **SCALINGS[case]}
    config = Qwen2Config(
        hidden_size=2 * head_dim, num_attention_heads=2, num_key_value_heads=2, rope_parameters=rope
    )
    angles, factor = megatron_angles(monkeypatch, config, head_dim)
    assert angles.dtype == torch.float32
    positions = torch.tensor([POSITIONS])
    cos, sin = Qwen2RotaryEmbedding(config)(torch.zeros(1), positions)
    # The same float32 products; the cosine of the same angle.
    torch.testing.assert_close(angles[POSITIONS, 0, 0].cos() * factor, cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(angles[POSITIONS, 0, 0].sin() * factor, sin[0], rtol=0, atol=1e-6)


def megatron_angles(monkeypatch, config, head_dim: int) -> tuple[torch.Tensor, float]:
    """Megatron's YaRN table [524288, 1, 1, head_dim] and attention factor for a transformers config."""
    flags = qwen_shape.to_arguments(qwen_shape.from_hf(config.to_dict(), "config.json"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    rotary = YarnRotaryEmbedding(
        head_dim,
        rotary_base=flags["rotary_base"],
        use_cpu_initialization=True,
        scaling_factor=flags["rotary_scaling_factor"],
        original_max_position_embeddings=flags["yarn_original_max_position_embeddings"],
        beta_fast=flags["yarn_beta_fast"],
        beta_slow=flags["yarn_beta_slow"],
        mscale=flags["mscale"],
        mscale_all_dim=flags["mscale_all_dim"],
        correction_range_round_to_int=flags["yarn_correction_range_round_to_int"],
    )
    return rotary.bfloat16().get_emb(524_288)


@pytest.mark.parametrize("case", SCALINGS)
def test_yarn_survives_arguments_and_config(parse, case):
    config = {"rope_scaling": {"rope_type": "yarn", **SCALINGS[case]}}
    settings = yarn.from_hf(config, "config.json")
    args = parse()
    vars(args).update(yarn.to_arguments(settings))
    assert yarn.from_arguments(args).attention_factor == pytest.approx(settings.attention_factor)
    assert yarn.from_hf({"rope_scaling": yarn.to_hf(settings)}, "config.json") == settings


def test_config_with_yarn_is_read_by_transformers(tmp_path):
    shape = presets.model_shape("qwen2.5-0.5b")
    made = qwen_shape.to_hf(replace(shape, yarn=yarn.Yarn(16.0, 32768), max_positions=524_288))
    (tmp_path / "config.json").write_text(json.dumps(made))
    config = Qwen2Config.from_pretrained(tmp_path)
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.max_position_embeddings == 524_288
