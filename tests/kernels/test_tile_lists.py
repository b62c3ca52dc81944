"""The Triton kernels that write lists equal the torch functions of the same name."""

import pytest
import torch

from megatron_mtrain.kernels import tile_lists
from megatron_mtrain.kernels.tile_lists import Slashes, key_lists, list_by_key, list_by_query, query_lists

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
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
        assert torch.equal(a.cpu(), e), name
