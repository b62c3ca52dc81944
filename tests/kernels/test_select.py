"""Selection without sorting equals selection by sorting, ties and edges included."""

import pytest
import torch

from megatron_mtrain.kernels import select
from megatron_mtrain.kernels.select import select_by_sorting, select_by_threshold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, params=[0, select.SHORT], ids=["in-pieces", "in-registers"])
def short(monkeypatch, request):
    """Every case runs on both kernels: rows in pieces, and rows in registers."""
    monkeypatch.setattr(select, "SHORT", request.param)


def check(scores, share, cap):
    scores = scores.to(DEVICE)
    share = torch.as_tensor(share, dtype=torch.float64, device=DEVICE)
    cap = torch.as_tensor(cap, dtype=torch.int32, device=DEVICE)
    expected = select_by_sorting(scores.double(), share, cap)
    assert torch.equal(select_by_threshold(scores, share, cap), expected)


@pytest.mark.parametrize("length", [100, 2500])
def test_random_mass_and_number(length):
    scores = torch.rand(6, length) ** 8
    scores /= scores.sum(-1, keepdim=True)
    check(scores, [0.9, 0.5, float("inf"), 0.999, 0.0, 0.3], [length, 7, 40, 50, 9, 0])


def test_ties_go_to_the_lower_position():
    scores = torch.zeros(4, 3000)
    scores[:, 700:2000] = 2.0**-11
    scores[:, 2500] = 0.25
    check(scores, [0.5, float("inf"), float("inf"), 0.25], [4096, 2000, 300, 4096])


def test_scores_may_be_large():
    scores = torch.rand(4, 700) ** 4 * 8
    scores[:, 100] = 3e38
    scores[:2, 100] = 5.0
    check(scores, [9.0, 60.0, float("inf"), 1.0], [700, 9, 5, 700])


def test_every_score_and_none():
    scores = torch.full((3, 640), 1 / 640)
    check(scores, [2.0, float("inf"), 0.5], [10_000, 640, 0])
    check(torch.zeros(2, 640), [0.9, float("inf")], [5, 3])


def test_one_score_has_everything():
    scores = torch.zeros(2, 2048)
    scores[:, 2047] = 1.0
    check(scores, [0.9, float("inf")], [10, 1])
