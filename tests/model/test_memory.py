"""What saves memory changes no loss: whole runs with and without, from one checkpoint."""

import pytest

FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def test_chunked_mlp_equals_plain(runs):
    """Under sequence parallelism and recompute, while gradients are reduced as they become ready.

    Only the order in which chunks add to the gradients of the weights differs.
    """
    expected = runs.losses("cp2tp2", "minfer")
    flags = (*FULL, "--overlap-grad-reduce", "--mlp-chunk-size", "100")
    assert runs.losses("cp2tp2", "minfer", flags) == pytest.approx(expected, rel=1e-5)


def test_offload_changes_no_bit(runs):
    expected = runs.losses("cp1", "minfer")
    assert runs.losses("cp1", "minfer", (*FULL, "--offload-layer-inputs")) == expected
