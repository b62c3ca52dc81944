"""Attended pairs counted from the lists of a step, against the mask that the reference makes of them."""

import pytest
import torch

from megatron_mtrain.kernels.pairs import attended_pairs
from megatron_mtrain.kernels.reference import block_mask, token_mask

from .conftest import DEVICE, draw_step
from .test_routed import routed_step

SIZE, SINGLE = 16, torch.float32


def begins(rows: int, keys: int, diagonal: bool) -> torch.Tensor:
    """First keys of two batch entries: where the rows' documents begin, by what the shards are."""
    first = torch.randint(keys + 1, (2, rows)).sort(-1).values
    if diagonal:
        starts = torch.rand(2, rows) < 0.1
        first = torch.where(starts, torch.arange(rows), 0).cummax(-1).values
    return first.int()


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("diagonal", [True, False], ids=["own-shard", "other-shard"])
@pytest.mark.parametrize("part", ["tiles", "columns", "routes"])
def test_pairs_are_those_of_the_mask(part, diagonal, documents):
    settings = {"batch": 2, "diagonal": diagonal}
    if part == "routes":
        step = routed_step(draw_step, (4, 2), (1, 1, 2), SIZE, 8, SINGLE, **settings)
    else:
        blocks = (5, 5) if diagonal else (4, 7)
        columns = {"columns": [20, 0, 65]} if part == "columns" else {}
        step = draw_step((4, 2), blocks, SIZE, 8, SINGLE, **settings, **columns)
    tiles = step.tiles
    if documents:
        tiles = tiles._replace(first_key=begins(len(step.query), len(step.key), diagonal).to(DEVICE))
    m, n = len(step.query) // SIZE, len(step.key) // SIZE
    mask = token_mask(tiles, slice(0, m), block_mask(tiles, n))
    assert torch.equal(attended_pairs(tiles), mask.sum((-1, -2)))
