"""The same training on every parallel layout: losses and all gradients, from one checkpoint.

Every number comes out of pretrain_qwen.py as users run it: losses from TensorBoard, gradients from the
checkpoint after one step of plain gradient descent.
"""

import pytest

from tests.model.conftest import LAYOUTS

TOLERANCE = 1e-4  # asked of float32; the order of sums alone gives about 1e-6
PARALLEL = [name for name in LAYOUTS if name != "cp1"]
ATTENTION = ["stripe_ring", "minfer", "moba", "xattn"]
# Pipeline stages do not know what a layer attends: two methods are enough there.
CASES = [
    (layout, attention)
    for layout in PARALLEL
    for attention in (ATTENTION[:2] if layout == "cp2pp2" else ATTENTION)
]


@pytest.mark.parametrize(("layout", "attention"), CASES)
def test_losses_equal_one_process(runs, layout, attention):
    expected = runs.losses("cp1", attention)
    actual = runs.losses(layout, attention)
    assert list(actual) == [1, 2, 3]
    assert actual == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(("layout", "attention"), CASES)
def test_gradients_equal_one_process(runs, layout, attention):
    expected = runs.gradients("cp1", attention)
    actual = runs.gradients(layout, attention)
    assert len(expected) > 8
    assert actual.keys() == expected.keys()
    assert max(worst(actual, expected).values()) < TOLERANCE


def worst(actual, expected) -> dict[str, float]:
    """Relative error of every tensor."""
    assert all(tensor.norm() > 0 for tensor in expected.values())
    return {name: float((actual[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


@pytest.mark.parametrize("attention", ATTENTION[1:])
def test_sparse_attention_is_not_exact_attention(runs, attention):
    assert runs.losses("cp1", attention)[1] != pytest.approx(runs.losses("cp1", "stripe_ring")[1], rel=1e-3)


def test_chunked_loss_equals_megatrons(runs):
    expected = runs.losses("cp2tp2", "stripe_ring", flags=("--loss-chunk-size", "0"))
    assert runs.losses("cp2tp2", "stripe_ring") == pytest.approx(expected, rel=1e-5)


def test_exact_attention_equals_megatron(runs):
    """The whole glue against Megatron's own model: its layers, core attention and rotary positions."""
    expected = runs.losses("cp1", "stripe_ring", change="megatron_attention")
    assert runs.losses("cp1", "stripe_ring") == pytest.approx(expected, rel=TOLERANCE)


def test_rotary_positions_of_another_order_are_found_out(runs):
    """Negative control: striped tokens with Megatron's zigzag positions give other gradients by far."""
    expected = runs.gradients("cp1", "stripe_ring")
    errors = worst(runs.gradients("cp2", "stripe_ring", change="megatron_rope"), expected)
    assert errors["decoder.layers.self_attention.linear_qkv.weight"] > 100 * TOLERANCE


FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")


@pytest.mark.parametrize(
    ("layout", "flags", "reuse"),
    [
        ("cp2", FULL, "nothing"),
        ("cp2", FULL, "index"),
        ("cp2", FULL, "output"),
        ("cp2pp2", FULL, "output"),
        ("cp2", SELECTIVE, "index"),
    ],
    ids=["full-nothing", "full-index", "full-output", "pipeline-output", "core-index"],
)
def test_recomputation_changes_nothing(runs, layout, flags, reuse):
    expected = runs.losses(layout, "minfer")
    assert runs.losses(layout, "minfer", (*flags, "--attn-reuse", reuse)) == expected
