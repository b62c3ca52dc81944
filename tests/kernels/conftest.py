"""Kernel tests: Triton's interpreter on a CPU, the real thing where there is a GPU.

The interpreter is chosen when a kernel is defined, so the switch is set here, before anything imports Triton.
Run this folder as a process of its own (`pytest tests/kernels`): in one where Triton is already there without
its interpreter, the tests of kernels skip themselves.

Legend: b batch, h query heads, g key heads, d head size, m, n query, key blocks, c column slots.
"""

import os
import sys
from typing import NamedTuple

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

from megatron_mtrain.kernels.reference import pack_bits
from megatron_mtrain.kernels.tiles import Columns, Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


class Step(NamedTuple):
    """The tensors of one ring step on the test's device."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    tiles: Tiles


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fills what torch.empty returns with NaN (or a large integer): an element that no kernel wrote shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor):
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return tensor.fill_(2**30) if tensor.dtype == torch.int32 else tensor

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs)))


@pytest.fixture
def draw():
    """A function that draws a random ring step; its inputs are new in every run of the tests."""
    from triton import knobs

    if DEVICE == "cpu" and not knobs.runtime.interpret:
        pytest.skip("Triton was imported without its interpreter: run tests/kernels as a process of its own")
    return draw_step


def draw_step(heads, blocks, block_size, head_dim, dtype, *, density=0.4, **options):
    """A Step with heads = (h, g) and blocks = (m, n); options are batch=1, diagonal=True and columns=None.

    `columns` are counts, of which every head takes the next one.

    The first query block, and the last key block of a step that is not the diagonal one, attend no tile.
    Column slots are padded to 64; slots past the count hold 0, list slots past the count garbage.
    """
    (h, g), (m, n) = heads, blocks
    batch, diagonal = options.get("batch", 1), options.get("diagonal", True)
    columns = options.get("columns")
    mask = torch.rand(batch, h, m, n) < density
    mask[:, :, 0] = False
    if diagonal:
        mask = (mask & torch.ones(m, n, dtype=torch.bool).tril()) | torch.eye(m, n, dtype=torch.bool)
        mask[:, 0, m // 2] = False
    else:
        mask[..., -1] = False
    listed = torch.arange(n) < mask.sum(-1)[..., None]
    index = torch.where(listed, torch.argsort(~mask, dim=-1, stable=True), 2**30).int()
    part = None if columns is None else _draw_columns(mask, block_size, diagonal, columns)
    tiles = Tiles(mask.sum(-1).int(), index, diagonal, block_size, part)

    def draw_tensor(tokens, count):
        return torch.randn(tokens, batch, count, head_dim).to(dtype).to(DEVICE)

    query, grad_out = (draw_tensor(m * block_size, h) for _ in range(2))
    key, value = (draw_tensor(n * block_size, g) for _ in range(2))
    return Step(query, key, value, grad_out, to_device(tiles, DEVICE))


def _draw_columns(mask, block_size, diagonal, counts):
    batch, h, m, n = mask.shape
    c = -(-max(counts) // 64) * 64
    index, count = torch.zeros(batch, h, c, dtype=torch.int32), torch.zeros(batch, h, dtype=torch.int32)
    earlier = torch.zeros(batch, h, m, c, dtype=torch.bool)
    covered = torch.zeros_like(earlier)
    for i in range(batch):
        for j in range(h):
            number = counts[(i * h + j) % len(counts)]
            at = torch.randperm(n * block_size)[:number].sort().values
            index[i, j, :number], count[i, j] = at, number
            # A step off the diagonal stands for a striped shard, of which query block i is past key block i.
            earlier[i, j, :, :number] = at // block_size < torch.arange(m)[:, None] + (not diagonal)
            covered[i, j, :, :number] = mask[i, j][:, at // block_size]
    return Columns(index, count, earlier.sum(-1).int(), pack_bits(earlier & ~covered))


def to_device(tiles, device):
    """The lists of `tiles` on another device."""

    def moved(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    columns = None if tiles.columns is None else Columns(*map(moved, tiles.columns))
    return Tiles(*map(moved, tiles._replace(columns=None)))._replace(columns=columns)
