"""Columns in Triton: as tiles of the forward and dQ, and their own dK and dV, against float64."""

import pytest
import torch

from .checks import check_step

triton_backend = pytest.importorskip("megatron_mtrain.kernels.triton_backend", reason="needs Triton")
vertical = pytest.importorskip("megatron_mtrain.kernels.vertical", reason="needs Triton")
HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize("diagonal", [True, False], ids=["own-shard", "other-shard"])
@pytest.mark.parametrize(
    ("shape", "columns", "batch"),
    [
        pytest.param(((2, 2), (3, 3), 128, 128, HALF), (64, 100), 1, id="block128-d128"),
        pytest.param(((4, 1), (4, 4), 64, 64, HALF), (64, 3, 0, 128), 1, id="block64-d64-gqa4-cap-full"),
        pytest.param(((7, 1), (4, 4), 32, 32, HALF), (40, 64, 1), 1, id="block32-d32-gqa7"),
        pytest.param(((8, 1), (4, 4), 16, 16, HALF), (40, 64, 5), 2, id="block16-d16-gqa8-batch2"),
        pytest.param(((4, 2), (3, 3), 64, 32, SINGLE), (70, 128, 9), 2, id="block64-d32-gqa2-batch2-float32"),
    ],
)
def test_equals_reference(draw, shape, columns, batch, diagonal):
    check_step(triton_backend, draw(*shape, batch=batch, diagonal=diagonal, columns=columns))


@pytest.mark.parametrize("density", [0, 1], ids=["no-tiles", "all-covered"])
def test_columns_alone_and_columns_that_tiles_cover(draw, density):
    step = draw((2, 1), (3, 3), 32, 32, HALF, diagonal=False, density=density, columns=(64, 20))
    check_step(triton_backend, step)


def test_every_token_is_a_column(draw):
    """The cap is full, every key token belongs to every head, and diagonal blocks hold columns too."""
    check_step(triton_backend, draw((4, 2), (4, 4), 16, 32, HALF, columns=(64,)))


def test_an_empty_column_part(draw):
    step = draw((2, 1), (4, 4), 16, 32, HALF, columns=(64,))
    none = step.tiles.columns._replace(
        index=step.tiles.columns.index[..., :0], visible=step.tiles.columns.visible[..., :0]
    )
    check_step(triton_backend, step._replace(tiles=step.tiles._replace(columns=none)))


@pytest.mark.parametrize("programs", [1, 64])
def test_chunks_of_query_blocks(draw, monkeypatch, programs):
    """One chunk, and more than there are query blocks with something to see."""
    monkeypatch.setattr(vertical, "PROGRAMS", programs)
    monkeypatch.setattr(vertical, "SMALLEST_CHUNK", 1)
    check_step(triton_backend, draw((4, 2), (5, 5), 16, 32, HALF, columns=(64, 33)))


def test_two_runs_agree_in_every_bit(draw):
    step = draw((4, 2), (4, 4), 16, 32, HALF, columns=(64, 33))
    for a, b in zip(check_step(triton_backend, step), check_step(triton_backend, step), strict=True):
        assert torch.equal(a, b)


def test_gather(draw):
    step = draw((4, 2), (4, 4), 16, 32, HALF, batch=2, columns=(40, 64))
    rows, index = vertical.gather_columns(step.key, step.tiles.columns, 4), step.tiles.columns.index
    assert torch.equal(rows[:64], step.key)
    for batch in range(2):
        for head in range(4):
            first = 64 + head % 2 * 64
            wanted = step.key[index[batch, head].long(), batch, head // 2]
            assert torch.equal(rows[first : first + 64, batch, head // 2], wanted)
