"""Imbalance and step times against hand-worked numbers, and the ring's benchmark in small, on the CPU."""

import sys
from argparse import Namespace

import pytest
import torch

from megatron_mtrain.layouts import make_layout
from tools.bench import bench_ring
from tools.plan import work
from tools.plan.ring_time import H200, Heads, ring_pass, step_imbalance, step_seconds, worker_imbalance

SHARED = torch.tensor([[4.0, 0.0], [2.0, 2.0]])  # by rank and source: 4 each


def test_imbalance_by_hand():
    assert worker_imbalance(SHARED) == 1.0
    # Own shard first: ranks have 4 and 2, then 0 and 2: (4 + 2) / (3 + 1) over all; the second step is 2 / 1.
    assert step_imbalance(SHARED, (2,)) == (1.5, 2.0)
    assert worker_imbalance(torch.tensor([[3.0, 3.0], [1.0, 1.0]])) == 1.5


def test_zigzag_shares_dense_work_evenly_and_stripe_nearly():
    pairs = work.block_pairs(work.draw("dense", 16384, 1))
    for name, most in (("zigzag", 1.0), ("stripe", 1 + 8 / 128)):  # stripe: at most a block of 128 a row more
        dealt = work.rank_pairs(pairs, make_layout(name, 16384, 8, 128))
        assert 1.0 <= worker_imbalance(dealt) <= most
        assert 1.0 <= step_imbalance(dealt, (8,))[0] <= most


def test_step_seconds_by_hand():
    pairs = torch.full((2, 2), 1e9, dtype=torch.float64)
    # 4 * 128 operations a pair at 410e12 a second; 12 bytes for each of 1000 * 16 * 128 elements at 4.1e12.
    forward = step_seconds(pairs, 1000, Heads(), H200, backward=False)
    assert forward[0, 1].item() == pytest.approx(512e9 / 410e12 + 24.576e6 / 4.1e12)
    backward = step_seconds(pairs, 1000, Heads(), H200, backward=True)
    assert (backward - forward)[1, 0].item() == pytest.approx(1.5 * 512e9 / 410e12)


def test_a_ring_of_one_is_its_compute():
    line = ring_pass(torch.tensor([[0.5]]), 1000, Heads(), (1,), H200, backward=True)
    assert (line.total, line.hidden, line.waited) == (0.5, 1.0, 0.0)


@pytest.mark.parametrize("method", work.METHODS)
def test_every_rank_and_source_can_be_timed(method):
    budget = work.Budget(columns=64, slash_share=0.2, chunk=256, topk=2)
    mask = work.draw(method, 1024, 2, budget=budget)
    args = Namespace(tokens=1024, heads=2, groups=1)
    forward, backward = bench_ring.times(mask, "stripe", 2, args, "cpu")
    assert forward.shape == backward.shape == (2, 2)
    assert torch.all(forward > 0)
    assert torch.all(backward > 0)


def test_report_in_small(monkeypatch, tmp_path, capsys):
    out = tmp_path / "ring.md"
    command = f"bench_ring.py --tokens 65536 --world 8 16 --heads 1 --groups 1 --out {out}"
    monkeypatch.setattr(sys, "argv", command.split())
    bench_ring.main()
    text = out.read_text()
    assert "minfer | " in text
    assert "dr_stripe" in text
    assert "No GPU ran" in text
    assert capsys.readouterr().out.strip() == text.strip()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_measuring_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_ring.py", "--measure"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        bench_ring.main()
