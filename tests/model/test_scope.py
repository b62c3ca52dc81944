"""--trainable: what a pattern finds is trained as if all were, the rest stays as it is and costs nothing."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_mtrain.scope import freeze_others, names, train_only
from tests.model.conftest import FRESH, RATE, read_weights
from tests.model.test_parallel import TOLERANCE

STEP = f"--optimizer sgd --sgd-momentum 0 --clip-grad 0 --lr {RATE} --min-lr {RATE} --train-iters 1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ATTENTION = ("linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight")  # not linear_qkv.layer_norm_weight


def in_attention(name: str) -> bool:
    return name.endswith(ATTENTION)


@pytest.mark.parametrize("layout", ["cp1", "cp2pp2"])
def test_gradients_of_attention_alone(runs, layout):
    """With recomputed layers, whose input is a frozen embedding's output."""
    expected = runs.gradients("cp1", "stripe_ring")
    saved = runs.folder / f"scope_{layout}"
    keep = ["--save", str(saved), "--no-save-optim", "--no-save-rng", "--load", runs.initial, *FRESH]
    flags = [*STEP.split(), *RECOMPUTE.split(), "--trainable", "self_attention"]
    runs.train(layout, "stripe_ring", [*flags, *keep])
    before, after = read_weights(runs.folder / "initial"), read_weights(saved)
    assert sum(map(in_attention, expected)) == 3
    for name, gradient in expected.items():
        actual = (before[name] - after[name]) / RATE
        if in_attention(name):
            assert (actual - gradient).norm() < TOLERANCE * gradient.norm(), name
        else:
            assert torch.equal(after[name], before[name]), name


def test_frozen_parameters_have_no_optimizer_state(runs):
    saved = runs.folder / "scope_state"
    flags = ["--lr", "1e-3", "--train-iters", "1", "--use-distributed-optimizer", "--bf16"]
    keep = ["--save", str(saved), "--load", runs.initial, *FRESH]
    runs.train("cp2", "stripe_ring", [*flags, "--trainable", "self_attention", "final_layernorm", *keep])
    entries = FileSystemReader(saved / "iter_0000001").read_metadata().state_dict_metadata
    states = [name for name in entries if name.startswith("optimizer.state.")]
    parameters = {name.split(".", 3)[3] for name in states}
    assert parameters == {
        "decoder.final_layernorm.weight",
        *(f"decoder.layers.self_attention.{name}" for name in ATTENTION),
    }
    assert len(states) == 3 * len(parameters)  # float32 weight and two moments


@pytest.fixture
def stage() -> torch.nn.Module:
    """A pipeline stage with two layers whose norms are Transformer Engine's."""
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList()
    for _ in range(2):
        layer = torch.nn.Module()
        layer.self_attention = torch.nn.Module()
        layer.self_attention.linear_qkv = torch.nn.Linear(2, 2, bias=False)
        layer.self_attention.linear_qkv.layer_norm_weight = torch.nn.Parameter(torch.ones(2))
        model.decoder.layers.append(layer)
    return model


def test_names_are_those_of_the_checkpoint(stage):
    expected = ["decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.input_layernorm.weight"]
    assert [name for name, _ in names([stage])] == 2 * expected


def test_every_layer_is_frozen_alike(stage):
    freeze_others([stage], ["self_attention"])
    assert [p.requires_grad for p in stage.parameters()] == [True, False] * 2


def test_no_pattern_trains_all(stage):
    train_only(None, None)
    assert all(param.requires_grad for param in stage.parameters())


@pytest.mark.parametrize("pattern", ["mlp", r"layers\.0\."])
def test_pattern_that_matches_nothing(stage, pattern):
    words = f"--trainable {re.escape(pattern)} matches no parameter; examples: self_attention"
    with pytest.raises(ValueError, match=words):
        freeze_others([stage], ["self_attention", pattern])


def test_pattern_that_matches_nothing_ends_the_run_in_one_line(stage):
    config = SimpleNamespace(pre_wrap_hooks=[])
    train_only(config, ["mlp"])
    with pytest.raises(SystemExit, match="error: --trainable mlp matches no parameter"):
        config.pre_wrap_hooks[0]([stage])


def test_no_regular_expression():
    with pytest.raises(ValueError, match=r"--trainable \[ is no regular expression"):
        train_only(None, ["["])
