"""The Triton backend of a ring step: checks, the gathered columns, and the kernels in their order.

Portable: tensor descriptors are TMA loads on Hopper and later and plain loads elsewhere, and Triton's
interpreter runs all of it on a CPU.

Legend: as in tiles.py.
"""

import torch

from . import block_sparse, routed, vertical
from .reference import block_mask
from .tile_lists import list_by_key

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)


def attend(query, key, value, tiles, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """out float32 [s, b, h, d] and lse float32 [b, h, s] of one ring step; see tiles.attend.

    Raises ValueError for shapes or dtypes that the kernels do not have.
    """
    tiles = _check(query, key, tiles, scale)
    query, key, value = (x.contiguous() for x in (query, key, value))
    if tiles.columns is not None:
        key, value = (vertical.gather_columns(x, tiles.columns, query.shape[2]) for x in (key, value))
    out, lse = block_sparse.forward(query, key, value, tiles, scale)
    if tiles.routes is not None:
        routed.add_forward(query, key, value, out, lse, tiles, scale)
    return out, lse


def attend_backward(grad_out, query, key, value, out, lse, tiles, scale: float, delta=None):
    """(dq [s, b, h, d], dk, dv [t, b, g, d]) in float32 of one ring step; see tiles.attend_backward.

    grad_out is rounded to the dtype of query. Raises ValueError as `attend` does.
    """
    tiles = _check(query, key, tiles, scale)
    grad_out, query, key, value = (x.to(query.dtype).contiguous() for x in (grad_out, query, key, value))
    if delta is None:
        delta = row_delta(grad_out, out)
    lse, delta = block_sparse.base_2(lse).contiguous(), delta.contiguous()
    if tiles.key_count is None:
        tiles = with_key_lists(tiles, key)
    dkey, dvalue = block_sparse.backward_key(grad_out, query, key, value, lse, delta, tiles, scale)
    keys, values = key, value
    if tiles.columns is not None:
        keys, values = (vertical.gather_columns(x, tiles.columns, query.shape[2]) for x in (key, value))
        vertical.add_column_gradients(
            dkey, dvalue, grad_out, query, (keys, values), (lse, delta), tiles, scale
        )
    dquery = block_sparse.backward_query(grad_out, query, keys, values, lse, delta, tiles, scale)
    if tiles.routes is not None:
        rows = (grad_out, query, key, value, lse, delta)
        routed.add_backward_key(*rows, dkey, dvalue, tiles, scale)
        routed.add_backward_query(*rows, dquery, tiles, scale)
    return dquery, dkey, dvalue


def row_delta(grad_out, out) -> torch.Tensor:
    """rowsum(grad_out * out) as float32 [b, h, s], in one pass; see tiles.row_delta."""
    return block_sparse.row_delta(grad_out.contiguous(), out.contiguous())


def with_key_lists(tiles, key):
    """`tiles` with its lists by block and head of key [t, b, g, d], for callers without them.

    Works for any lists, through a mask [b, h, m, n]; an index that knows its structure writes them faster.
    """
    mask = block_mask(tiles, len(key) // tiles.block_size)
    key_count, key_index = list_by_key(mask, key.shape[2])
    return tiles._replace(key_count=key_count, key_index=key_index)


def _check(query, key, tiles, scale: float):
    """The tiles, without columns where there are no slots for any, else with what documents hide of them."""
    (s, b, h, d), (t, _, g, _), size = query.shape, key.shape, tiles.block_size
    if query.dtype not in DTYPES or d not in HEAD_DIMS:
        raise ValueError(
            f"the Triton kernels take float16, bfloat16 or float32 and head sizes {HEAD_DIMS}, "
            f"not {query.dtype} and {d}; the reference backend takes any"
        )
    if size not in BLOCK_SIZES or s % size or t % size:
        raise ValueError(
            f"{s} query and {t} key tokens in blocks of {size}: the Triton kernels need whole blocks "
            f"of a size out of {BLOCK_SIZES}"
        )
    if h % g or scale <= 0:
        raise ValueError(
            f"{h} query heads must be a multiple of {g} key heads, and the scale {scale} positive"
        )
    first_key = tiles.first_key
    if first_key is not None and (first_key.dtype != torch.int32 or first_key.shape != (b, s)):
        raise ValueError(
            f"first_key is {first_key.dtype} {list(first_key.shape)}; it must be int32 [{b}, {s}], a key for "
            "every row of every batch entry"
        )
    if tiles.columns is not None and not tiles.columns.index.shape[-1]:
        tiles = tiles._replace(columns=None)
    return vertical.with_first_slots(tiles)
