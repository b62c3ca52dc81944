"""Antidiagonal scores in Triton, against the definition in float64."""

import pytest
import torch

from megatron_mtrain.kernels import antidiagonal

from .conftest import DEVICE

pytestmark = pytest.mark.usefixtures("draw")
HALF, SINGLE = torch.float16, torch.float32
# float32 sums of up to 2^11 products of rounded numbers, which both sides take as they are.
UNITS = 2.0**-24 * 64


def blocks_of(rank, world, count):
    return torch.arange(rank, rank + world * count, world, device=DEVICE)


def draw_step(heads, counts, block_size, head_dim, dtype, batch=1):
    (h, g), (m, n) = heads, counts

    def draw_tensor(tokens, count):
        return torch.randn(tokens, batch, count, head_dim).to(dtype).to(DEVICE)

    return draw_tensor(m * block_size, h), draw_tensor(n * block_size, g)


def definition(query, key, query_blocks, key_blocks, stride, scale):
    """Scores of cells by the formula, one offset at a time: [b, h, i, j] in float64, -inf where later."""
    q, k = query.double().permute(1, 2, 0, 3), key.double().permute(1, 2, 0, 3)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = sum(q[..., stride - 1 - x :: stride, :] @ k[..., x::stride, :].mT for x in range(stride))
    size = query.shape[0] // len(query_blocks) // stride
    at = torch.arange(size, device=DEVICE)
    rows, columns = ((blocks[:, None] * size + at).flatten() for blocks in (query_blocks, key_blocks))
    return (scores * scale).masked_fill(columns > rows[:, None], -torch.inf)


@pytest.mark.parametrize("tile", [None, (32, 64, 32, 4, 2)], ids=["tiles-as-tuned", "small-tiles"])
@pytest.mark.parametrize(
    ("heads", "counts", "block_size", "stride", "head_dim", "rest"),
    [
        pytest.param((4, 2), (5, 5), 128, 16, 64, (HALF, 1, 0, 0, 1), id="one-rank-d64"),
        pytest.param((2, 1), (36, 36), 32, 4, 32, (HALF, 2, 0, 0, 1), id="stride4-batch2"),
        pytest.param((8, 1), (5, 5), 128, 16, 128, (HALF, 1, 1, 1, 4), id="stripe-own-d128-gqa8"),
        pytest.param((3, 3), (17, 17), 64, 16, 32, (HALF, 1, 1, 2, 4), id="stripe-later-gqa1"),
        pytest.param(
            (7, 1), (9, 9), 64, 16, 32, (SINGLE, 2, 2, 1, 3), id="stripe-earlier-float32-gqa7-batch2"
        ),
        pytest.param((2, 2), (12, 9), 128, 8, 32, (HALF, 1, 0, 2, 3), id="fewer-keys"),
    ],
)
def test_equals_definition(heads, counts, block_size, stride, head_dim, rest, tile, monkeypatch):
    dtype, batch, rank, source, world = rest
    if tile is not None:
        monkeypatch.setattr(antidiagonal, "MASS", tile)
        monkeypatch.setattr(antidiagonal, "SCORES", tile)
    query, key = draw_step(heads, counts, block_size, head_dim, dtype, batch)
    step = query, key, blocks_of(rank, world, counts[0]), blocks_of(source, world, counts[1])
    check(step, stride, 0.3 * (stride * head_dim) ** -0.5)


def check(step, stride, scale):
    scores = definition(*step, stride, scale)
    mass = antidiagonal.cell_mass_on_triton(*step, stride, scale)
    wanted = scores.logsumexp(-1)
    assert torch.equal(mass == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(mass.double(), wanted, rtol=UNITS, atol=UNITS)

    lse = torch.where(wanted == -torch.inf, 0.0, wanted + 0.5).float()  # other ranks hold the rest
    made = antidiagonal.block_scores_on_triton(*step, lse, stride, scale)
    probability = (scores - lse.double()[..., None]).exp()
    m, n = (len(blocks) for blocks in step[2:])
    wanted = probability.unflatten(-1, (n, -1)).unflatten(-3, (m, -1)).sum((-1, -3))
    assert made.shape == wanted.shape and made.dtype == torch.float32
    torch.testing.assert_close(made.double(), wanted, rtol=4 * UNITS, atol=4 * UNITS)
    assert not made[(step[3] > step[2][:, None]).expand_as(made)].any()


def test_both_halves_of_a_zigzag_shard():
    """Block ids ascend with a gap in the middle."""
    blocks = torch.tensor([0, 1, 2, 3, 4, 27, 28, 29, 30, 31], device=DEVICE)
    other = torch.tensor([5, 6, 7, 8, 9, 22, 23, 24, 25, 26], device=DEVICE)
    query, key = draw_step((2, 1), (10, 10), 64, 32, HALF)
    for key_blocks in (blocks, other):
        check((query, key, blocks, key_blocks), 8, 0.02)


def test_torch_equals_definition():
    query, key = draw_step((4, 2), (4, 4), 32, 32, torch.float64)
    step = query, key, blocks_of(1, 2, 4), blocks_of(0, 2, 4)
    scores = definition(*step, 8, 0.05)
    mass = antidiagonal.cell_mass(*step, stride=8, scale=0.05)
    torch.testing.assert_close(mass, scores.logsumexp(-1))
    made = antidiagonal.block_scores(*step, mass, stride=8, scale=0.05)
    torch.testing.assert_close(
        made.sum(-1), torch.full_like(made[..., 0], 4)
    )  # four cells of a block, mass 1 each


def test_large_scores():
    """Scores of several thousand neither overflow nor lose the softmax."""
    query, key = draw_step((2, 1), (4, 4), 64, 32, SINGLE)
    step = query, key, blocks_of(0, 1, 4), blocks_of(0, 1, 4)
    scores = definition(*step, 8, 100.0)
    mass = antidiagonal.cell_mass_on_triton(*step, 8, 100.0)
    torch.testing.assert_close(mass.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-2)
