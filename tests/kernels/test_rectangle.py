"""Rectangles name exactly the pairs of the lists; torch's fused kernels attend them like the reference."""

import pytest
import torch

from megatron_mtrain import AttentionConfig, make_layout
from megatron_mtrain.index import build_index
from megatron_mtrain.kernels import rectangle, reference
from megatron_mtrain.kernels.reference import block_mask, token_mask
from tests.oracle import relative_error

SOURCES = [(1, 1), (1, 0), (1, 2)]


def step(rank, source, *, tokens=512, block_size=16, size=32, dtype=torch.float32, device="cpu"):
    """(query, key, value, grad_out, tiles) of one zigzag step of four ranks."""
    layout = make_layout("zigzag", tokens, 4, block_size)
    shapes = [4, 2, 2, 4]
    tensors = [torch.randn(layout.local_tokens, 2, h, size, device=device, dtype=dtype) for h in shapes]
    config = AttentionConfig.from_dict("dense", {"implementation": "zigzag", "block_size": block_size})
    index = build_index(config, *tensors[:2], layout, [], 0)
    index = index.__class__(**{**index.__dict__, "rank": rank})
    return *tensors, index.tiles(source, by_key=True)


@pytest.mark.parametrize(("rank", "source"), SOURCES)
def test_rectangle_is_the_lists(rank, source):
    query, *_, tiles = step(rank, source)
    first, keys, causal = tiles.rectangle
    mask = token_mask(tiles, slice(0, None), block_mask(tiles, len(query) // tiles.block_size))
    expected = torch.zeros_like(mask)
    expected[:, :, first:, :keys] = True
    assert torch.equal(mask, expected.tril() if causal else expected)
    assert mask.shape[2] == len(query)


def test_single_rank_is_causal_and_stripes_have_none():
    config = AttentionConfig.from_dict("dense", {"block_size": 16})
    query = torch.randn(64, 1, 2, 16)
    single = build_index(config, query, query, make_layout("stripe", 64, 1, 16), [], 0)
    assert single.tiles(0).rectangle == (0, 64, True)
    striped = single.__class__(**{**single.__dict__, "layout": make_layout("stripe", 128, 2, 16)})
    assert striped.tiles(0).rectangle is None


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "source"), SOURCES)
@pytest.mark.parametrize("library", ["cudnn", "flash"])
@pytest.mark.parametrize("size", [64, 128])
def test_fused_kernels_equal_the_reference(monkeypatch, rank, source, library, size):
    if library == "flash":
        monkeypatch.setattr(rectangle, "_on_cudnn", lambda query: False)
    settings = {"tokens": 4096, "block_size": 128, "size": size, "dtype": torch.bfloat16, "device": "cuda"}
    query, key, value, grad_out, tiles = step(rank, source, **settings)
    wide = [tensor.double() for tensor in (query, key, value)]
    out, lse = reference.attend(*wide, tiles, 0.1)
    expected = (out, *reference.attend_backward(grad_out.double(), *wide, out, lse, tiles, 0.1))
    actual_out, actual_lse = rectangle.attend(query, key, value, tiles, 0.1)
    torch.testing.assert_close(actual_lse, lse.float(), rtol=1e-3, atol=1e-3)
    rows = (out.bfloat16(), torch.where(lse == -torch.inf, 0.0, lse).float())
    grads = rectangle.attend_backward(grad_out, query, key, value, *rows, tiles, 0.1)
    for actual, wanted in zip((actual_out, *grads), expected, strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual.cpu(), wanted.cpu()) < 4 * torch.finfo(torch.bfloat16).eps
