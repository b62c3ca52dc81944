"""The Triton kernels that write lists equal the torch functions of the same name."""

import pytest
import torch

from megatron_mtrain.kernels import tile_lists
from megatron_mtrain.kernels.tile_lists import (
    Slashes,
    key_lists,
    list_by_key,
    list_by_query,
    list_key_ranges,
    list_ranges,
    query_lists,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def same_lists(actual, expected):
    (count, index), (wanted_count, wanted) = actual, expected
    assert torch.equal(count.cpu(), wanted_count)
    listed = torch.arange(wanted.shape[-1]) < wanted_count[..., None]
    assert torch.equal(torch.where(listed, index.cpu(), -1), torch.where(listed, wanted, -1))


def masks(kind):
    generator = torch.Generator().manual_seed(2)
    if kind == "any":
        return torch.rand(2, 6, 5, 7, generator=generator) < 0.4
    on = torch.rand(2, 6, 24, generator=generator) < 0.4
    return Slashes(on, torch.tensor([1, 4, 19, 22]), torch.tensor([0, 5, 18, 23]))


def moved(mask):
    return Slashes(*(t.to(DEVICE) for t in mask)) if isinstance(mask, Slashes) else mask.to(DEVICE)


@pytest.mark.parametrize("kind", ["any", "slashes"])
@pytest.mark.parametrize("chunk", [2, 1024])
def test_lists(monkeypatch, kind, chunk):
    monkeypatch.setattr(tile_lists, "CHUNK", chunk)
    mask = masks(kind)
    same_lists(query_lists(moved(mask)), list_by_query(mask))
    same_lists(key_lists(moved(mask), 2), list_by_key(mask, 2))


@pytest.mark.parametrize("slots", [64, 128])
@pytest.mark.parametrize("source", [[0, 1, 2, 3, 4, 5], [0, 4, 5, 16, 18, 23]])
def test_columns(monkeypatch, slots, source):
    generator = torch.Generator().manual_seed(4)
    on = torch.rand(2, 3, 24, generator=generator) < 0.5
    slashes = Slashes(on, torch.tensor([0, 3, 4, 22]), torch.tensor(source))
    selected = torch.rand(2, 3, 96, generator=generator) < 0.5
    expected = tile_lists.list_columns(selected, slashes, 16, slots)
    monkeypatch.setattr(tile_lists, "_column_bits", tile_lists.column_bits)
    actual = tile_lists.list_columns(selected.to(DEVICE), moved(slashes), 16, slots)
    for name in ("index", "count", "limit", "visible"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


def test_ranges_equal_the_lists_of_their_mask():
    first, count = torch.tensor([0, 0, 2, 3, 5]), torch.tensor([1, 2, 2, 0, 2])
    blocks = torch.arange(7)
    mask = (blocks >= first[:, None]) & (blocks < (first + count)[:, None])
    same_lists(list_ranges(first, count, 2, batch=2, heads=4), narrowed(list_by_query(expand(mask)), 2))
    first = torch.tensor([0, 1, 2, 2, 5, 4, 4])
    count = torch.tensor([2, 1, 1, 1, 0, 1, 1])
    rows = torch.arange(5)[:, None]
    mask = (rows >= first) & (rows < first + count)
    actual = list_key_ranges(first, count, 2, num_blocks=5, batch=2, heads=4, groups=2)
    same_lists(actual, narrowed(list_by_key(expand(mask), 2), 4))


def expand(mask):
    return mask.expand(2, 4, -1, -1)


def narrowed(lists, slots):
    return lists[0], lists[1][..., :slots]
