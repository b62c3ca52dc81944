"""Recall and cost of every budget of a grid, against masks made by loops."""

import itertools

import pytest
import torch

from megatron_mtrain.index.draw import GROUPS, HEADS, synthetic
from tests.oracle import minfer_mask
from tools.pattern.budgets import (
    Measured,
    Settings,
    choose,
    fixed_axis,
    flex_axis,
    measure,
    sample_rows,
)

TOKENS, BLOCK = 192, 16
SETTINGS = Settings(last_q=24, sink_tokens=3, local_window=20, block_size=BLOCK)
AXES = {
    "fixed": (fixed_axis([0, 5, 40, TOKENS]), fixed_axis([0, 3, 12])),
    "flex": (flex_axis([0.2, 0.7, 0.95], 30), flex_axis([0.1, 0.6, 1.0], 8)),
    "mixed": (fixed_axis([2, 16]), flex_axis([0.5], TOKENS)),
}


@pytest.fixture(scope="module")
def tensors():
    """query [N, H, d] and key [N, g, d] in float64: both sides then rank columns alike."""
    query, key = synthetic(TOKENS)
    return query[:, 0].double(), key[:, 0].double()


@pytest.mark.parametrize("kind", AXES)
def test_every_budget_equals_the_mask_by_loops(tensors, kind):
    query, key = tensors
    vertical, slash = AXES[kind]
    rows = sample_rows(TOKENS, 50, seed=3)
    found = measure(query, key, rows, vertical, slash, SETTINGS)
    probability = exact(query, key)
    budgets = [zip(*axis, strict=True) for axis in (vertical, slash)]
    for (v, columns), (s, slashes) in itertools.product(*map(enumerate, budgets)):
        mask = minfer_mask(query[:, None], key[:, None], [(*columns, *slashes)] * HEADS, **vars(SETTINGS))[0]
        assert torch.equal(found.pairs[:, v, s], mask.sum((1, 2)).double())
        expected = (probability * mask)[:, rows].sum(-1).mean(-1)
        # Probabilities are float32: 2 ** -24 each, and rows of 192 are summed.
        assert (found.kept[:, v, s] - expected).abs().max() < TOKENS * 2**-24


def exact(query, key):
    """Causal softmax [H, N, N]."""
    scores = torch.einsum("thd,uhd->htu", query, key.repeat_interleave(HEADS // GROUPS, 1))
    scores = scores * query.shape[-1] ** -0.5
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def test_choice_is_the_cheapest_that_keeps_enough():
    kept = torch.tensor([[[0.5, 0.8], [0.9, 0.95]], [[0.1, 0.2], [0.3, 0.2]]], dtype=torch.float64)
    pairs = torch.tensor([[[10.0, 30.0], [30.0, 40.0]], [[1.0, 2.0], [9.0, 5.0]]], dtype=torch.float64)
    columns, slashes = choose(Measured(kept, pairs), 0.8)
    # Of two at 30 pairs the one with fewer columns; the second head takes what keeps most.
    assert (columns.tolist(), slashes.tolist()) == ([0, 1], [1, 0])


def test_rows_are_spread_over_the_sequence():
    rows = sample_rows(1000, 10, seed=0)
    assert (rows // 100).tolist() == list(range(10))
    assert torch.equal(sample_rows(5, 99, seed=1), torch.arange(5))
