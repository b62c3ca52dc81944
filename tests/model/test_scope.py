"""--trainable: what a pattern finds is trained as if all were, the rest stays as it is and costs nothing."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_mtrain import scope
from megatron_mtrain.scope import _train_rows, freeze_others, names, train_only
from tests.model.conftest import FRESH, RATE, read_weights
from tests.model.test_parallel import TOLERANCE

STEP = f"--optimizer sgd --sgd-momentum 0 --clip-grad 0 --lr {RATE} --min-lr {RATE} --train-iters 1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ATTENTION = ("linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight")  # not linear_qkv.layer_norm_weight


@pytest.mark.parametrize(
    ("layout", "patterns"),
    [("cp1", ["self_attention"]), ("cp2pp2", ["self_attention", "embedding"])],
    ids=["frozen embedding", "tied embedding of two stages"],
)
def test_gradients_of_what_is_trained(runs, layout, patterns):
    """With recomputed layers, whose input is a frozen embedding's output."""
    expected = runs.gradients("cp1", "stripe_ring")
    saved = runs.folder / f"scope_{layout}"
    keep = ["--save", str(saved), "--no-save-optim", "--no-save-rng", "--load", runs.initial, *FRESH]
    flags = [*STEP.split(), *RECOMPUTE.split(), "--trainable", *patterns]
    runs.train(layout, "stripe_ring", [*flags, *keep])
    before, after = read_weights(runs.folder / "initial"), read_weights(saved)
    trained = [name for name in expected if name.endswith(ATTENTION) or name.split(".")[0] in patterns]
    assert len(trained) == 2 + len(patterns)
    for name, gradient in expected.items():
        actual = (before[name] - after[name]) / RATE
        if name in trained:
            assert (actual - gradient).norm() < TOLERANCE * gradient.norm(), name
        else:
            assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("layout", ["cp1", "cp2tp2"])
def test_gradients_of_query_and_key_alone(runs, layout):
    """The rows of query and key move as if all were trained; those of value stay."""
    expected = runs.gradients("cp1", "stripe_ring")
    saved = runs.folder / f"scope_qk_{layout}"
    keep = ["--save", str(saved), "--no-save-optim", "--no-save-rng", "--load", runs.initial, *FRESH]
    runs.train(layout, "stripe_ring", [*STEP.split(), "--trainable", r"linear_qkv\.(query|key)", *keep])
    before, after = read_weights(runs.folder / "initial"), read_weights(saved)
    for name, gradient in expected.items():
        actual = (before[name] - after[name]) / RATE
        if "linear_qkv." not in name or "layer_norm" in name:
            assert torch.equal(after[name], before[name]), name
            continue
        # [layers, ...] rows: for each of 2 key heads 2 query heads, a key and a value, of 16 rows each
        actual, gradient = (tensor.unflatten(1, (2, 4, 16)) for tensor in (actual, gradient))
        assert not actual[:, :, 3].any()
        error = (actual[:, :, :3] - gradient[:, :, :3]).norm()
        assert error < TOLERANCE * gradient[:, :, :3].norm(), name


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


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("decoder.layers.3.mlp.linear_fc1.weight", ["decoder.layers.mlp.linear_fc1.weight"]),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", ["decoder.layers.pre_mlp_layernorm.weight"]),
        (
            "decoder.layers.11.self_attention.linear_qkv.bias",
            [f"decoder.layers.self_attention.linear_qkv.{part}.bias" for part in ("query", "key", "value")],
        ),
    ],
)
def test_what_patterns_see(name, seen):
    assert names(name) == seen


def test_rows_of_shared_key_heads(stage):
    """One key head of two rows, two query heads, on the second of two ranks: key and value."""
    param = torch.nn.Parameter(torch.zeros(4, 1))
    model = SimpleNamespace(
        config=SimpleNamespace(num_attention_heads=2, kv_channels=2, gradient_accumulation_fusion=False),
        pg_collection=SimpleNamespace(tp=SimpleNamespace(rank=lambda: 1, size=lambda: 2)),
    )
    _train_rows(param, [False, True, False], model, 0.0)
    param.sum().backward()
    assert param.grad.flatten().tolist() == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="--weight-decay 0 and --no-gradient-accumulation-fusion"):
        _train_rows(param, [False, True, False], model, 0.1)


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


def test_pattern_that_matches_nothing_ends_the_run_in_one_line(stage, monkeypatch):
    config = SimpleNamespace(pre_wrap_hooks=[])
    monkeypatch.setattr(scope, "get_args", lambda: SimpleNamespace(weight_decay=0))
    train_only(config, ["mlp"])
    with pytest.raises(SystemExit, match="error: --trainable mlp matches no parameter"):
        config.pre_wrap_hooks[0]([stage])


def test_no_regular_expression():
    with pytest.raises(ValueError, match=r"--trainable \[ is no regular expression"):
        train_only(None, ["["])
