"""Rows that begin their keys late (Tiles.first_key), in every Triton kernel, against float64."""

import types

import pytest
import torch

from megatron_mtrain.kernels import tiles as contract
from megatron_mtrain.kernels.tiles import Rectangle, Tiles

from .checks import check_step
from .conftest import DEVICE
from .test_routed import routed_step

triton_backend = pytest.importorskip("megatron_mtrain.kernels.triton_backend", reason="needs Triton")
vertical = pytest.importorskip("megatron_mtrain.kernels.vertical", reason="needs Triton")
HALF, SINGLE = torch.float16, torch.float32

# For every batch entry (row, first key from there on), of 64 rows and keys. In a row's own shard both are
# where its document begins: inside blocks, at block borders, several in a block.
OWN = [[(21, 21), (37, 37)], [(16, 16), (20, 20), (25, 25), (48, 48)]]
# In another shard they are not, and 64 hides all.
OTHER = [[(10, 5), (30, 47), (40, 48)], [(0, 3), (20, 16), (33, 40), (50, 64)]]


def with_documents(step, starts):
    """`step` with the first keys of its rows, for as many batch entries as it has."""
    rows, batch = step.query.shape[:2]
    first_key = torch.zeros(batch, rows, dtype=torch.int32)
    for at, entry in enumerate(starts[:batch]):
        for row, key in entry:
            first_key[at, row:] = key
    return step._replace(tiles=step.tiles._replace(first_key=first_key.to(DEVICE)))


def check(step, diagonal):
    """check_step, and that a row without keys has neither output nor gradient."""
    step = with_documents(step, OWN if diagonal else OTHER)
    out, lse, dq, *_ = check_step(triton_backend, step)
    hidden = (step.tiles.first_key >= len(step.key)).T
    assert not out[hidden].any() and not dq[hidden].any()
    assert (lse.permute(2, 0, 1)[hidden] == -torch.inf).all()


@pytest.mark.parametrize("diagonal", [True, False], ids=["own-shard", "other-shard"])
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype", "columns"),
    [
        pytest.param((4, 1), 16, HALF, None, id="tiles-gqa4"),
        pytest.param((2, 1), 32, SINGLE, None, id="tiles-float32"),
        pytest.param((4, 2), 16, HALF, (40, 64, 5), id="columns"),
        pytest.param((2, 2), 32, SINGLE, (50, 64), id="columns-float32"),
    ],
)
def test_equals_reference(draw, heads, block_size, dtype, columns, diagonal):
    blocks = (64 // block_size, 64 // block_size)
    check(draw(heads, blocks, block_size, 32, dtype, batch=2, diagonal=diagonal, columns=columns), diagonal)


@pytest.mark.parametrize("diagonal", [True, False], ids=["own-shard", "other-shard"])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [pytest.param((2, 1), HALF, id="gqa2"), pytest.param((2, 2), SINGLE, id="float32")],
)
def test_routes_equal_reference(draw, heads, dtype, diagonal):
    check(routed_step(draw, heads, (1, 1, 2), 16, 32, dtype, batch=2, diagonal=diagonal), diagonal)


@pytest.mark.parametrize("diagonal", [True, False], ids=["own-shard", "other-shard"])
def test_tiles_of_64_keys_and_skipped_columns(draw, diagonal):
    """Two words of bits for a row, and whole tiles of columns that a query block does not reach."""
    step = draw((2, 1), (3, 3), 128, 32, HALF, diagonal=diagonal, columns=(190,))
    step = with_documents(
        step, [[(100, 100), (140, 140), (290, 290)] if diagonal else [(9, 127), (256, 200)]]
    )
    check_step(triton_backend, step)


def test_chunks_past_the_last_document(draw, monkeypatch):
    """Programs of the columns' gradients whose query blocks all begin after their columns."""
    monkeypatch.setattr(vertical, "SMALLEST_CHUNK", 1)
    step = draw((2, 1), (6, 6), 16, 32, HALF, columns=(96,))
    check_step(triton_backend, with_documents(step, [[(40, 40), (70, 70)]]))


def test_nothing_is_left(draw):
    """Every key is hidden from every row."""
    for step in (
        draw((2, 1), (2, 2), 16, 32, HALF, columns=(9,)),
        routed_step(draw, (2, 1), (1, 1), 16, 32, HALF),
    ):
        hidden = with_documents(step, [[(0, len(step.key))]])
        out, lse, *grads = check_step(triton_backend, hidden)
        assert (lse == -torch.inf).all() and not any(tensor.any() for tensor in (out, *grads))


@pytest.mark.parametrize("columns", [(20, 32), None], ids=["columns", "routes"])
def test_one_document_changes_no_bit(draw, columns):
    heads = (2, 1)
    if columns:
        step = draw(heads, (2, 2), 16, 32, HALF, columns=columns)
    else:
        step = routed_step(draw, heads, (1, 1), 16, 32, HALF)
    one = with_documents(step, [[]])
    for a, b in zip(check_step(triton_backend, step), check_step(triton_backend, one), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("diagonal", [True, False], ids=["own-shard", "other-shard"])
@pytest.mark.parametrize("columns", [None, (256, 100, 0)], ids=["routes", "columns"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiled_kernels_equal_reference(draw, diagonal, columns, head_dim):
    settings = (128, head_dim, torch.bfloat16)
    options = {"batch": 2, "diagonal": diagonal}
    if columns:
        step = draw((8, 2), (8, 8), *settings, columns=columns, **options)
    else:
        step = routed_step(draw, (8, 2), (3, 2, 3), *settings, queries=8, **options)
    # Documents of 64 rows become documents of 1024.
    starts = [[(16 * row, 16 * key) for row, key in entry] for entry in (OWN if diagonal else OTHER)]
    check_step(triton_backend, with_documents(step, starts))


@pytest.mark.parametrize("first_key", [torch.zeros(1, 64, dtype=torch.int64), torch.zeros(64, 1).int()])
def test_first_keys_of_another_kind(draw, first_key):
    step = draw((2, 1), (4, 4), 16, 32, HALF)
    with pytest.raises(ValueError, match=r"int32 \[1, 64\]"):
        triton_backend.attend(*step[:3], step.tiles._replace(first_key=first_key), 0.1)


def test_a_step_with_documents_is_no_rectangle():
    query = types.SimpleNamespace(
        dtype=torch.bfloat16, shape=(64, 1, 2, 64), is_cuda=True, device=torch.device("cuda")
    )
    tiles = Tiles(None, None, True, 16, rectangle=Rectangle(0, 64, True))
    chosen = [
        contract._kernels("auto", query, tiles._replace(first_key=first)).__name__.rpartition(".")[2]
        for first in (None, torch.zeros(1, 64).int())
    ]
    assert chosen == ["rectangle", "triton_backend"]
