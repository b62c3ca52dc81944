"""The choice of chunks and the rows of every chunk in Triton: against torch, and against the gates in
float64.
"""

import pytest
import torch

from megatron_mtrain.kernels import route
from megatron_mtrain.kernels.reference import unpack_bits

from .conftest import DEVICE

pytestmark = pytest.mark.usefixtures("draw")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def bits_of(chosen, chunks):
    """bool [b, h, s, c]"""
    return unpack_bits(chosen.transpose(-1, -2))[..., :chunks]


def draw_gate(heads, blocks, head_dim, dtype, *, batch=1, chunks=None, per_chunk=2, **settings):
    """(query, means, chunk of every block): random, or small whole numbers, of which many gates are equal."""
    (h, g), chunks = heads, chunks or -(-blocks // per_chunk)
    block_size, whole = settings.get("block_size", 16), settings.get("whole", False)

    def draw_tensor(*shape):
        x = torch.randint(-2, 3, shape).float() if whole else torch.randn(shape)
        return x.to(DEVICE)

    query = draw_tensor(blocks * block_size, batch, h, head_dim).to(dtype)
    return query, draw_tensor(chunks, batch, g, head_dim), torch.arange(blocks, device=DEVICE) // per_chunk


@pytest.mark.parametrize(
    ("heads", "blocks", "head_dim", "dtype", "settings"),
    [
        pytest.param((4, 2), 14, 32, SINGLE, {"batch": 2}, id="float32-gqa2-batch2"),
        pytest.param((7, 1), 11, 64, HALF, {}, id="float16-gqa7-short-last"),
        pytest.param((2, 2), 16, 128, BRAIN, {}, id="bfloat16-d128"),
        pytest.param((1, 1), 80, 32, BRAIN, {"per_chunk": 1}, id="bfloat16-80-chunks"),
        pytest.param((1, 1), 10, 32, SINGLE, {"per_chunk": 1, "chunks": 300}, id="300-chunks"),
        pytest.param((1, 1), 4, 32, HALF, {"block_size": 128, "per_chunk": 1}, id="block128"),
    ],
)
@pytest.mark.parametrize("choices", [0, 1, 5])
def test_choice(heads, blocks, head_dim, dtype, settings, choices):
    """Every row takes as many as it may, none from its own chunk on, and leaves no higher gate out."""
    query, means, chunk_of_block = draw_gate(heads, blocks, head_dim, dtype, **settings)
    size, chunks = settings.get("block_size", 16), len(means)
    chosen = route.choose_chunks_on_triton(query, means, chunk_of_block, choices, size)
    assert chosen.shape == (*query.shape[1:3], -(-chunks // 32), len(query)) and chosen.dtype == torch.int32
    taken = unpack_bits(chosen.transpose(-1, -2))
    assert not taken[..., chunks:].any()
    taken = taken[..., :chunks]
    own = chunk_of_block.repeat_interleave(size)
    past = torch.arange(chunks, device=DEVICE) < own[:, None]
    assert not (taken & ~past).any()
    assert torch.equal(taken.sum(-1), own.clamp(max=choices).expand(*query.shape[1:3], -1))
    q = query.double().permute(1, 2, 0, 3).unflatten(1, (heads[1], -1))
    gate = torch.einsum("bgrsd,cbgd->bgrsc", q, means.double()).flatten(1, 2)
    lowest = gate.masked_fill(~taken, torch.inf).amin(-1)
    highest = gate.masked_fill(taken | ~past, -torch.inf).amax(-1)
    # d products of size 1 to 16 added in float32 on both sides of the comparison.
    assert ((highest - lowest) <= head_dim * 2.0**-20).all()


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
def test_ties_go_to_the_lower_chunk(dtype):
    """Small whole numbers are exact in every dtype: the two choices are equal, ties and all."""
    query, means, chunk_of_block = draw_gate((4, 2), 24, 32, dtype, whole=True)
    made = route.choose_chunks_on_triton(query, means, chunk_of_block, 4, 16)
    assert torch.equal(made, route.choose_chunks_by_sorting(query, means, chunk_of_block, 4, 16))


def test_blocks_of_a_striped_rank():
    """Blocks of a rank may skip chunks."""
    query, means, _ = draw_gate((2, 1), 6, 32, HALF, whole=True, chunks=9)
    chunk_of_block = torch.tensor([0, 2, 3, 3, 6, 8], device=DEVICE)
    made = route.choose_chunks_on_triton(query, means, chunk_of_block, 3, 16)
    assert torch.equal(made, route.choose_chunks_by_sorting(query, means, chunk_of_block, 3, 16))


def test_means_in_three_parts():
    means = torch.randn(50, 64, device=DEVICE) * torch.logspace(-6, 6, 64, device=DEVICE)
    parts = route._in_bfloat16(means)
    assert torch.equal(parts.double().sum(0), means.double())


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "chunks", "choices"),
    [
        pytest.param(1, 2, 700, 5, 3, id="5-chunks"),
        pytest.param(2, 1, 512, 32, 4, id="32-chunks-batch2"),
        pytest.param(1, 2, 1030, 70, 2, id="70-chunks"),
        pytest.param(1, 1, 16, 1, 0, id="no-choice"),
    ],
)
def test_rows_of_chunks(batch, heads, rows, chunks, choices):
    ranked = torch.rand(batch, heads, rows, chunks, device=DEVICE)
    taken = ranked.argsort(-1).argsort(-1) < torch.randint(choices + 1, (rows, 1), device=DEVICE)
    taken[..., chunks // 2] = False  # nobody's choice
    words = torch.nn.functional.pad(taken, (0, -chunks % 32))
    chosen = route.pack_bits(words).transpose(-1, -2).contiguous()
    row_start, row_index = route.route_rows_on_triton(chosen, chunks, choices)
    assert row_start.shape == (batch, heads, chunks + 1) and row_index.shape == (batch, heads, rows * choices)
    wanted_start, wanted_index = route.route_rows_by_scatter(chosen, chunks, choices)
    assert torch.equal(row_start, wanted_start)
    for b in range(batch):
        for h in range(heads):
            end = row_start[b, h, -1]
            assert torch.equal(row_index[b, h, :end], wanted_index[b, h, :end])
            start = row_start[b, h].tolist()
            for chunk in range(chunks):
                listed = row_index[b, h, start[chunk] : start[chunk + 1]]
                assert torch.equal(listed.long(), taken[b, h, :, chunk].nonzero()[:, 0])


@pytest.mark.parametrize("dtype", [HALF, torch.float64], ids=str)
def test_sums_of_chunks(dtype):
    key = torch.randn(96, 2, 3, 16, device=DEVICE).to(dtype)
    chunk_of_block = torch.tensor([0, 0, 2, 2, 2, 3], device=DEVICE)
    sums = route.chunk_sums(key, chunk_of_block, 5, 16)
    wanted = torch.zeros(5, 2, 3, 16, dtype=torch.float64, device=DEVICE)
    wanted.index_add_(0, chunk_of_block.repeat_interleave(16), key.double())
    assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(sums.double(), wanted, rtol=0, atol=1e-5)  # float32 sums of 48 numbers
