"""What saves memory changes no loss: whole runs with and without, from one checkpoint."""

import pytest

FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@pytest.mark.parametrize(
    ("layout", "flags"),
    [("cp2tp2", FULL), ("cp2dp2", ("--overlap-grad-reduce",))],
    ids=["sequence-parallel-recompute", "overlapped-gradients"],
)
def test_chunked_mlp_equals_plain(runs, layout, flags):
    """Only the order in which chunks add to the gradients of the weights differs."""
    expected = runs.losses(layout, "minfer")
    actual = runs.losses(layout, "minfer", (*flags, "--mlp-chunk-size", "100"))
    assert actual == pytest.approx(expected, rel=1e-5)


def test_offload_changes_no_bit(runs):
    expected = runs.losses("cp2pp2", "minfer")
    assert runs.losses("cp2pp2", "minfer", (*FULL, "--offload-layer-inputs")) == expected
