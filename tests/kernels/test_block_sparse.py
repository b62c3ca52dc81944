"""Block-sparse attention in Triton equals the naive reference in float64, forward and all three gradients."""

import pytest
import torch

from megatron_mtrain.kernels import reference
from megatron_mtrain.kernels.reference import row_delta

from .checks import check_step, exact

triton_backend = pytest.importorskip("megatron_mtrain.kernels.triton_backend", reason="needs Triton")
HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize("diagonal", [True, False], ids=["own-shard", "other-shard"])
@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        pytest.param(((2, 2), (3, 3), 128, 128, HALF), 1, id="block128-d128"),
        pytest.param(((4, 1), (3, 3), 64, 64, HALF), 1, id="block64-d64-gqa4"),
        pytest.param(((7, 1), (4, 4), 32, 32, HALF), 1, id="block32-d32-gqa7"),
        pytest.param(((8, 1), (5, 5), 16, 16, HALF), 2, id="block16-d16-gqa8-batch2"),
        pytest.param(((4, 2), (3, 3), 32, 64, SINGLE), 2, id="block32-d64-gqa2-batch2-float32"),
        pytest.param(((2, 1), (2, 2), 128, 32, SINGLE), 1, id="block128-d32-float32"),
    ],
)
def test_equals_reference(draw, shape, batch, diagonal):
    check_step(triton_backend, draw(*shape, batch=batch, diagonal=diagonal))


@pytest.mark.parametrize("blocks", [(2, 5), (5, 2)], ids=["more-keys", "more-queries"])
def test_shards_of_different_length(draw, blocks):
    check_step(triton_backend, draw((4, 2), blocks, 32, 32, HALF, diagonal=False), scale=0.3, delta=True)


def test_nothing_attended(draw):
    out, lse, dq, dk, dv = check_step(
        triton_backend, draw((2, 1), (2, 2), 16, 32, HALF, diagonal=False, density=0)
    )
    assert (lse == -torch.inf).all()
    assert not any(tensor.any() for tensor in (out, dq, dk, dv))


def test_every_tile_attended(draw):
    check_step(triton_backend, draw((2, 1), (4, 4), 16, 32, HALF, density=1))


def test_rows_that_saw_nothing_in_the_whole_ring(draw):
    """A global lse of -inf gives gradients 0, not NaN."""
    step = draw((2, 1), (3, 3), 16, 32, SINGLE)
    out, lse, *_ = exact(step, 0.2)
    out[:16], lse[..., :16] = 0, -torch.inf
    dq, dk, dv = triton_backend.attend_backward(*_backward_arguments(step, out, lse), step.tiles, 0.2)
    assert not dq[:16].any()
    assert all(tensor.isfinite().all() for tensor in (dq, dk, dv))


def test_large_scores(draw):
    """Scores of several thousand neither overflow nor lose the softmax."""
    step = draw((2, 1), (3, 3), 16, 32, SINGLE)
    out, lse = triton_backend.attend(step.query, step.key, step.value, step.tiles, 500.0)
    wanted, wanted_lse, *_ = exact(step, 500.0)
    # A score is a float32 sum of 16 products: each may be off by half a unit of the largest.
    largest = 500.0 * float(step.query.norm(dim=-1).max() * step.key.norm(dim=-1).max())
    error = 16 * 2.0**-24 * largest
    assert (out - wanted).norm() <= 2 * error * wanted.norm()
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=error)


def test_key_lists_given_or_derived(draw):
    step = draw((4, 2), (4, 5), 16, 32, HALF, diagonal=False)
    derived = triton_backend.with_key_lists(step.tiles, step.key)
    mask = reference.block_mask(step.tiles, 5)
    for g in range(2):
        for n in range(5):
            wanted = mask[0, 2 * g : 2 * g + 2, :, n].flatten().nonzero().flatten()
            assert derived.key_count[0, g, n] == len(wanted)
            assert torch.equal(derived.key_index[0, g, n, : len(wanted)].long(), wanted)
    out, lse, *_ = exact(step, 0.2)
    arguments = _backward_arguments(step, out, lse)
    given = triton_backend.attend_backward(*arguments, derived, 0.2)
    for a, b in zip(given, triton_backend.attend_backward(*arguments, step.tiles, 0.2), strict=True):
        assert torch.equal(a, b)


def test_strided_inputs(draw):
    step = draw((4, 2), (3, 3), 16, 32, HALF)
    strided = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in step[:4]]
    assert not strided[0].is_contiguous()
    check_step(triton_backend, step._replace(**dict(zip(step._fields, strided, strict=False))))


def test_two_runs_agree_in_every_bit(draw):
    step = draw((4, 2), (3, 3), 32, 32, HALF)
    for a, b in zip(check_step(triton_backend, step), check_step(triton_backend, step), strict=True):
        assert torch.equal(a, b)


def test_row_delta(draw):
    step = draw((3, 3), (3, 3), 16, 32, HALF, batch=2)
    out = torch.randn(step.query.shape, device=step.query.device)
    wanted = row_delta(step.grad_out.double(), out.double())
    made = triton_backend.block_sparse.row_delta(step.grad_out, out)
    # Sums of 32 terms of size about 1 in float32.
    torch.testing.assert_close(made.double(), wanted, rtol=0, atol=32 * 2.0**-20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"query": torch.zeros(64, 1, 2, 48)}, "head sizes", id="head-dim"),
        pytest.param({"query": torch.zeros(64, 1, 2, 32, dtype=torch.float64)}, "float64", id="dtype"),
        pytest.param({"query": torch.zeros(60, 1, 2, 32)}, "blocks of 16", id="ragged"),
        pytest.param({"query": torch.zeros(64, 1, 3, 32)}, "multiple of 2", id="heads"),
        pytest.param({"scale": -1.0}, "positive", id="scale"),
    ],
)
def test_what_the_kernels_do_not_have(draw, change, message):
    step = draw((2, 2), (4, 4), 16, 32, SINGLE)
    query = change.get("query", step.query)
    with pytest.raises(ValueError, match=message):
        triton_backend.attend(query, step.key, step.value, step.tiles, change.get("scale", 0.1))


def _backward_arguments(step, out, lse):
    return step.grad_out, step.query, step.key, step.value, out.float(), lse.float()
