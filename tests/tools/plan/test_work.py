"""Pairs counted block by block equal those that the package's own index lists for the kernels."""

import pytest
import torch

from megatron_mtrain.kernels.pairs import attended_pairs
from megatron_mtrain.layouts import make_layout
from tools.plan.work import METHODS, Budget, block_pairs, draw, index_of, rank_pairs

TOKENS, HEADS, BLOCK, WORLD = 1024, 4, 16, 4
BUDGET = Budget(columns=64, slash_share=0.15, chunk=64, topk=4, threshold=0.7)


@pytest.fixture(scope="module", params=METHODS)
def mask(request):
    return draw(request.param, TOKENS, HEADS, budget=BUDGET, block=BLOCK)


@pytest.mark.parametrize("name", ["zigzag", "stripe"])
def test_counts_are_those_of_the_index(mask, name):
    layout = make_layout(name, TOKENS, WORLD, BLOCK)
    counted = rank_pairs(block_pairs(mask), layout)
    for rank in range(WORLD):
        index = index_of(mask, layout, rank, groups=2)
        listed = [int(attended_pairs(index.tiles(source)).sum()) for source in range(WORLD)]
        assert listed == counted[rank].tolist()


def test_dense_counts_every_pair():
    pairs = block_pairs(draw("dense", TOKENS, HEADS, block=BLOCK))
    assert pairs.sum() == HEADS * TOKENS * (TOKENS + 1) // 2


def test_layouts_deal_the_same_work(mask):
    pairs = block_pairs(mask)
    dealt = [rank_pairs(pairs, make_layout(name, TOKENS, w, BLOCK)).sum() for name, w in
             [("zigzag", 2), ("zigzag", 8), ("stripe", 4), ("stripe", 16)]]  # fmt: skip
    assert all(total == pairs.sum() for total in dealt)


def test_budgets_are_kept():
    mask = draw("minfer", TOKENS, HEADS, budget=BUDGET, block=BLOCK)
    assert mask.columns.sum(-1).tolist() == [64] * HEADS
    assert set(mask.slashes.sum(-1).tolist()) <= {10, 11}  # 64 blocks * 0.15, slashes come in pairs
    chunks = draw("moba", TOKENS, HEADS, budget=BUDGET, block=BLOCK).chunks
    assert int(chunks.sum(-1).max()) == 3
    assert not torch.any(chunks[:, :4])  # the first chunk's blocks have no past


def test_unknown_method_lists_the_methods():
    with pytest.raises(ValueError, match="unknown method 'flash'; choose one of dense, minfer, moba, xattn"):
        draw("flash", 128, 1)
