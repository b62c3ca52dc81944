"""The pieces around the attention kernels: merge, bit packing, lists and the reference itself."""

import pytest
import torch

from megatron_mtrain.kernels.merge import merge
from megatron_mtrain.kernels.reference import (
    attend,
    attend_backward,
    block_mask,
    pack_bits,
    token_mask,
    unpack_bits,
)
from megatron_mtrain.kernels.tile_lists import Slashes, list_by_key, list_by_query, list_columns
from megatron_mtrain.kernels.tiles import Tiles
from tests.oracle import naive_attention, relative_error


def random_mask(*shape, density=0.4, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def test_bits_round_trip():
    bits = random_mask(2, 3, 96, density=0.5)
    assert torch.equal(unpack_bits(pack_bits(bits)), bits)


def test_lists_are_ascending_and_complete():
    mask = random_mask(2, 4, 5, 7)
    count, index = list_by_query(mask)
    for b, h, m in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(5)).tolist():
        assert index[b, h, m, : count[b, h, m]].tolist() == mask[b, h, m].nonzero()[:, 0].tolist()
    tiles = Tiles(count, index, False, 8)
    assert torch.equal(block_mask(tiles, 7), mask)


def test_key_lists_name_every_head_of_the_group():
    mask = random_mask(2, 6, 5, 7)
    count, index = list_by_key(mask, 2)
    for b, g, n in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(7)).tolist():
        entries = [(head * 5 + m) for head in range(3) for m in range(5) if mask[b, 3 * g + head, m, n]]
        assert index[b, g, n, : count[b, g, n]].tolist() == entries


def test_columns_that_a_tile_covers_are_not_visible():
    selected = torch.zeros(1, 1, 32, dtype=torch.bool)
    selected[..., [1, 9, 10, 30]] = True
    on = torch.tensor([True, False, True, False])[None, None]
    slashes = Slashes(on, torch.arange(4), torch.arange(4))
    columns = list_columns(selected, slashes, 8, 4)
    assert columns.index[0, 0, :4].tolist() == [1, 9, 10, 30]
    assert columns.index.shape[-1] == 64
    assert columns.count.tolist() == [[4]]
    assert columns.limit.tolist() == [[[0, 1, 3, 3]]]
    seen = [row.nonzero()[:, 0].tolist() for row in unpack_bits(columns.visible)[0, 0]]
    assert seen == [[], [0], [1, 2], [0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merge_equals_one_softmax(dtype):
    scores = torch.randn(3, 1, 2, 5, 24, dtype=dtype)
    values = torch.randn(24, 4, dtype=dtype)
    scores[0, :, :, 0] = -torch.inf
    scores[:, :, :, 1] = -torch.inf
    scores[1, :, :, 2] *= 300
    parts = scores.unbind(0)

    def attended(rows, values=values):
        lse = torch.logsumexp(rows, -1)
        weights = torch.exp(rows - torch.where(lse == -torch.inf, 0, lse)[..., None])
        return (weights @ values).permute(2, 0, 1, 3).contiguous(), lse

    out, lse = attended(parts[0])
    for part in parts[1:]:
        merge(out, lse, *attended(part))
    expected, expected_lse = attended(torch.cat(parts, -1), values.repeat(3, 1))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert not out[1].any()


def test_reference_equals_the_oracle_over_tiles_and_columns():
    generator = torch.Generator().manual_seed(5)
    query, key, value, grad_out = (
        torch.randn(40, 2, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )
    on = random_mask(2, 4, 5)
    on[..., 0] = True
    slashes = Slashes(on, torch.arange(5), torch.arange(5))
    mask = slashes.mask()
    selected = random_mask(2, 4, 40, density=0.2, seed=1)
    columns = list_columns(selected, slashes, 8, 40)
    tiles = Tiles(*list_by_query(mask), True, 8, columns)
    full = torch.zeros(2, 4, 40, 40, dtype=torch.bool)
    for t in range(40):
        for u in range(t + 1):
            full[:, :, t, u] = mask[:, :, t // 8, u // 8] | selected[:, :, u]
    assert torch.equal(token_mask(tiles, slice(0, 5), mask), full)
    out, lse = attend(query, key, value, tiles, 0.5)
    grads = attend_backward(grad_out, query, key, value, out, lse, tiles, 0.5)
    expected = naive_attention(query, key, value, full, grad_out, 0.5)
    assert max(relative_error(a, e) for a, e in zip((out, *grads), expected, strict=True)) < 1e-13
