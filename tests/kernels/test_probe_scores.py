"""The probe kernels equal the torch functions of the same name."""

import pytest
import torch

from megatron_mtrain.kernels import probe_scores as module
from megatron_mtrain.kernels.probe_scores import log_mass, probe_scores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("rows", "block_size"), [(16, 32), (5, 16), (40, 16), (64, 128)])
@pytest.mark.parametrize("blocks", [[0, 1, 2, 3], [1, 3]], ids=["all", "of-two-ranks"])
def test_equals_torch(monkeypatch, rows, block_size, blocks):
    generator = torch.Generator().manual_seed(rows)
    num_tokens = 4 * block_size
    probe = torch.randn(rows, 2, 4, 16, generator=generator)
    key = torch.randn(len(blocks) * block_size, 2, 2, 16, generator=generator)
    starts = torch.tensor(blocks) * block_size
    first = num_tokens - rows
    settings = {"scale": 0.3, "block_size": block_size, "num_tokens": num_tokens}

    def run(device):
        tensors = [t.to(device) for t in (probe, key, starts)]
        lse = log_mass(*tensors, first, 0.3, block_size)
        return lse, *probe_scores(*tensors, first, lse, **settings)

    expected = run("cpu")
    monkeypatch.setattr(module, "runs_on_triton", lambda key, block_size: True)
    for actual, wanted in zip(run(DEVICE), expected, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-5, atol=1e-7)
    # Every row's probabilities sum to 1 when the local keys are all there are.
    if len(blocks) == 4:
        torch.testing.assert_close(expected[1].sum(-1), torch.ones(2, 4))


def test_by_batch_entry(monkeypatch):
    """Keys of other places, another probe and another first key in every entry, one of them padded."""
    generator = torch.Generator().manual_seed(1)
    probe = torch.randn(12, 3, 4, 16, generator=generator)
    key = torch.randn(64, 3, 2, 16, generator=generator)
    starts = torch.tensor([[0, 16, 32, 48], [16, 48, 64, 80], [32, 48, 1000, 1000]])
    first, begin = torch.tensor([50, 80, 41]), torch.tensor([3, 20, 40])
    settings = {"scale": 0.3, "block_size": 16}

    def run(device):
        parts = [t.to(device) for t in (probe, key, starts, first)]
        lse = log_mass(*parts, 0.3, 16, begin.to(device))
        return lse, *probe_scores(*parts, lse, **settings, num_tokens=80, begin=begin.to(device))

    expected = run("cpu")
    for entry in range(3):
        positions = (starts[entry][:, None] + torch.arange(16)).flatten()
        counts = (positions >= begin[entry]) & (positions <= first[entry] + torch.arange(12)[:, None])
        keys = key[:, entry].repeat_interleave(2, 1)
        scores = torch.einsum("qhd,thd->hqt", probe[:, entry], keys) * 0.3
        probability = torch.softmax(scores.masked_fill(~counts, -torch.inf), -1)
        torch.testing.assert_close(expected[1][entry], probability.mean(1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(expected[2].sum(-1), torch.ones(3, 4))
    monkeypatch.setattr(module, "runs_on_triton", lambda key, block_size: True)
    for actual, wanted in zip(run(DEVICE), expected, strict=True):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-5, atol=1e-7)
