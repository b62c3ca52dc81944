"""Save on one parallel layout, resume on another: the losses go on as in the run that was never stopped."""

from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.model.test_parallel import TOLERANCE

STEPS = 5
SAVED = 2


@pytest.fixture(scope="module")
def unbroken(runs):
    """Losses of 5 steps on CP2 x TP2 with the distributed optimizer, saved after 2 of them, and where."""
    folder = str(runs.folder / "unbroken")
    flags = ["--use-distributed-optimizer", "--save", folder, "--save-interval", str(SAVED)]
    return runs.losses("cp2tp2", "minfer", flags, steps=STEPS), folder


@pytest.mark.parametrize("layout", ["cp2tp2", "cp4", "cp1", "cp2pp2"])
def test_losses_continue(runs, unbroken, layout):
    losses, folder = unbroken
    flags = ["--use-distributed-optimizer", "--load", folder, "--ckpt-step", str(SAVED)]
    resumed = runs.losses(layout, "minfer", flags, steps=STEPS)
    assert list(resumed) == list(range(SAVED + 1, STEPS + 1))
    assert resumed == pytest.approx({step: losses[step] for step in resumed}, rel=TOLERANCE)


def test_losses_continue_without_distributed_optimizer(runs):
    folder = str(runs.folder / "plain")
    losses = runs.losses("cp2", "stripe_ring", ["--save", folder, "--save-interval", str(SAVED)], steps=STEPS)
    resumed = runs.losses("cp1", "stripe_ring", ["--load", folder, "--ckpt-step", str(SAVED)], steps=STEPS)
    assert resumed == pytest.approx(
        {step: losses[step] for step in range(SAVED + 1, STEPS + 1)}, rel=TOLERANCE
    )


def test_bfloat16_run_resumes(runs):
    """bfloat16 weights, float32 masters, from CP2 to CP1 of the same model: what bfloat16 resolves, 2 **
    -8."""
    folder, bf16 = str(runs.folder / "bf16"), ["--bf16", "--use-distributed-optimizer"]
    losses = runs.losses(
        "cp2", "stripe_ring", [*bf16, "--save", folder, "--save-interval", str(SAVED)], steps=3
    )
    resumed = runs.losses("cp1", "stripe_ring", [*bf16, "--load", folder, "--ckpt-step", str(SAVED)], steps=3)
    assert resumed == pytest.approx({3: losses[3]}, rel=2**-8)


def test_checkpoint_has_the_extra_state_that_transformer_engine_looks_for(runs):
    entries = FileSystemReader(Path(runs.initial) / "iter_0000001").read_metadata().state_dict_metadata
    extra = [name for name in entries if "_extra_state" in name]
    assert any(name.startswith("decoder.final_layernorm._extra_state") for name in extra)
    assert not any("input_layernorm" in name or "pre_mlp_layernorm" in name for name in extra)
