"""Routed rows in Triton, on top of listed tiles, against the reference in float64."""

import pytest
import torch

from megatron_mtrain.kernels.tiles import Routes

from .checks import check_step, exact
from .conftest import DEVICE

triton_backend = pytest.importorskip("megatron_mtrain.kernels.triton_backend", reason="needs Triton")
HALF, SINGLE = torch.float16, torch.float32


def routed_step(draw, heads, runs, block_size, head_dim, dtype, *, share=0.5, queries=4, **settings):
    """A step whose keys come in `runs` (blocks of each): rows go to the even ones, tiles lie in the odd ones.

    The first query block attends nothing. Entries past the last run are out of range.
    """
    h, n = heads[0], sum(runs)
    diagonal = settings.get("diagonal", True)
    blocks = (n if diagonal else queries, n)
    step = draw(heads, blocks, block_size, head_dim, dtype, **settings)
    batch, m = step.query.shape[1], blocks[0]
    run_of_block = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs))
    count, index = (x.cpu().clone() for x in (step.tiles.block_count, step.tiles.block_index))
    sent = torch.rand(batch, h, len(runs), m * block_size) < share
    sent[..., :block_size] = False
    sent[:, :, 1::2] = False
    for row in torch.cartesian_prod(torch.arange(batch), torch.arange(h), torch.arange(m)).tolist():
        listed = index[*row][: count[*row]]
        listed = listed[run_of_block[listed] % 2 == 1] if row[2] else listed[:0]
        count[*row] = len(listed)
        index[*row][: len(listed)] = listed
    each = sent.sum(-1)
    row_start = torch.nn.functional.pad(each.cumsum(-1), (1, 0)).int()
    row_index = torch.full((batch, h, int(each.sum(-1).max()) + 3), 2**30, dtype=torch.int32)
    for at in torch.cartesian_prod(torch.arange(batch), torch.arange(h)).tolist():
        rows = sent[*at].nonzero()[:, 1].int()
        row_index[*at][: len(rows)] = rows
    key_start = torch.nn.functional.pad(torch.tensor(runs).cumsum(0) * block_size, (1, 0)).int()
    routes = Routes(key_start.to(DEVICE), row_start.to(DEVICE), row_index.to(DEVICE))
    tiles = step.tiles._replace(block_count=count.to(DEVICE), block_index=index.to(DEVICE), routes=routes)
    return step._replace(tiles=tiles)


@pytest.mark.parametrize("diagonal", [True, False], ids=["own-shard", "other-shard"])
@pytest.mark.parametrize(
    ("heads", "runs", "block_size", "head_dim", "dtype", "batch"),
    [
        pytest.param((2, 2), (1, 1, 1), 128, 128, HALF, 1, id="block128-d128"),
        pytest.param((4, 1), (2, 0, 2, 1), 64, 64, HALF, 1, id="block64-d64-gqa4-empty-run"),
        pytest.param((7, 1), (0, 1, 2), 32, 32, HALF, 1, id="block32-d32-gqa7-first-run-empty"),
        pytest.param((8, 1), (1, 1, 1, 0), 16, 32, HALF, 2, id="block16-d32-gqa8-batch2-last-run-empty"),
        pytest.param((4, 2), (1, 1, 2), 32, 64, SINGLE, 2, id="block32-d64-gqa2-batch2-float32"),
    ],
)
def test_equals_reference(draw, heads, runs, block_size, head_dim, dtype, batch, diagonal):
    step = routed_step(draw, heads, runs, block_size, head_dim, dtype, batch=batch, diagonal=diagonal)
    out, lse, dq, *_ = check_step(triton_backend, step)
    assert (lse[..., :block_size] == -torch.inf).all()
    assert not out[:block_size].any() and not dq[:block_size].any()


@pytest.mark.parametrize("share", [0.02, 1.0], ids=["few-rows", "all-rows"])
def test_few_and_all_rows(draw, share):
    check_step(triton_backend, routed_step(draw, (4, 2), (2, 1, 1), 32, 32, HALF, share=share))


def test_routes_alone(draw):
    """No tile: every row starts from out 0 and lse -inf, and some rows stay there."""
    step = routed_step(draw, (4, 2), (2, 1, 2), 32, 32, HALF, share=0.3, density=0, diagonal=False)
    lse = check_step(triton_backend, step)[1]
    assert (lse == -torch.inf).any() and (lse > -torch.inf).any()


def test_no_row_is_sent(draw):
    step = routed_step(draw, (2, 1), (1, 2, 1), 32, 32, HALF, share=0)
    plain = step._replace(tiles=step.tiles._replace(routes=None))
    for a, b in zip(check_step(triton_backend, step), check_step(triton_backend, plain), strict=True):
        assert torch.equal(a, b)


def test_no_room_for_routes(draw):
    """A row index of size 0: every row has its own chunk only."""
    step = routed_step(draw, (2, 1), (1, 2, 1), 32, 32, HALF, share=0)
    none = step.tiles.routes._replace(row_index=step.tiles.routes.row_index[..., :0].contiguous())
    check_step(triton_backend, step._replace(tiles=step.tiles._replace(routes=none)))


def test_more_rows_than_a_tile_in_a_run(draw):
    """Queries of several tiles go to one run, and the last tile of rows is not full."""
    step = routed_step(
        draw, (2, 1), (1, 1), 32, 32, HALF, share=0.9, queries=12, diagonal=False, batch=2, density=0.5
    )
    check_step(triton_backend, step, scale=0.4, delta=True)


def test_large_scores(draw):
    """Runs whose scores lie thousands apart: the running maximum moves, nothing overflows."""
    step = routed_step(draw, (2, 1), (1, 1, 1), 32, 32, SINGLE)
    out, lse = triton_backend.attend(step.query, step.key, step.value, step.tiles, 300.0)
    wanted, wanted_lse, *_ = exact(step, 300.0)
    # The scores' own float32 rounding, 2^-24 of 1e4, moves a probability by 1e-3 at most.
    assert (out - wanted).norm() <= 1e-2 * wanted.norm()
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=0)


def test_two_runs_agree_in_every_bit(draw):
    step = routed_step(draw, (4, 2), (2, 1, 1), 32, 32, HALF)
    for a, b in zip(check_step(triton_backend, step), check_step(triton_backend, step), strict=True):
        assert torch.equal(a, b)
