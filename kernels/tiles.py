"""One ring step: which (query block, key block) tiles are attended, and the functions that attend them.

Legend: b batch, s query tokens, t key tokens, h query heads, g key heads, d head size, m query blocks, n key
blocks, c column slots, r runs of routed keys, e routed rows; all of the local query shard and of the visiting
key shard.
"""

import logging
import os
from typing import NamedTuple

import torch

from . import reference


class Columns(NamedTuple):
    """Key tokens attended one by one, on top of the tiles: the vertical lines of a mask.

    index    int32 [b, h, c], local positions in the visiting key shard, ascending; slots past `count` are 0.
             c is a multiple of 64
    count    int32 [b, h]
    limit    int32 [b, h, m], for every query block the columns that may be visible are slots 0 .. limit - 1
    visible  int32 [b, h, m, c / 32], a bit per slot (slot 32 * w + i is bit i of word w): whether every row
             of the query block attends the column. It does when the column lies in an earlier block and no
             tile of the step covers it already; bits of slots past `limit` are 0.
    first_slot  int32 [b, h, s] or None: what Tiles.first_key is among the columns; the kernels derive it
    """

    index: torch.Tensor
    count: torch.Tensor
    limit: torch.Tensor
    visible: torch.Tensor
    first_slot: torch.Tensor | None = None


class Routes(NamedTuple):
    """Query rows sent to runs of keys, on top of the tiles: every listed row attends the whole run.

    key_start  int32 [r + 1], run i is the local keys key_start[i] .. key_start[i + 1] - 1 of the visiting
               shard
    row_start  int32 [b, h, r + 1] and
    row_index  int32 [b, h, e], the local query rows of run i are row_index[row_start[i] .. row_start[i + 1] -
               1], ascending. No tile of the step covers what a route covers. What follows the last run is
               undefined
    """

    key_start: torch.Tensor
    row_start: torch.Tensor
    row_index: torch.Tensor


class Rectangle(NamedTuple):
    """A step that is one rectangle: query rows from `first_row` on attend keys 0 .. num_keys - 1.

    They attend all of them, or causally; causal only where the rectangle is the whole step.
    """

    first_row: int
    num_keys: int
    causal: bool


class Tiles(NamedTuple):
    """What the local queries attend in the visiting key shard. All tensors are contiguous.

    block_count  int32 [b, h, m], number of attended key blocks of every query block
    block_index  int32 [b, h, m, k], their local ids in the first `block_count` slots, ascending; what the
                 other slots hold is undefined. k is n, or less where no list is longer and there are no
                 columns
    diagonal     bool, whether the key shard is the queries' own: then the tile (i, i) is masked causally
                 inside and every other tile is attended whole
    block_size   tokens of a block
    columns      Columns or None
    routes       Routes or None
    rectangle    Rectangle or None: the same tiles in short, for kernels that need no lists
    first_key    int32 [b, s] or None: row i attends no local key before first_key[:, i], whatever the tiles,
                 columns and routes list. Ascending: this is where the document of a row begins
    key_count    int32 [b, g, n] and
    key_index    int32 [b, g, n, k'], the same tiles listed by key block and key head, for dK and dV: an entry
                 is (query head within its group) * m + query block, ascending. None in a forward
    """

    block_count: torch.Tensor
    block_index: torch.Tensor
    diagonal: bool
    block_size: int
    columns: Columns | None = None
    routes: Routes | None = None
    rectangle: Rectangle | None = None
    first_key: torch.Tensor | None = None
    key_count: torch.Tensor | None = None
    key_index: torch.Tensor | None = None


BACKENDS = ("auto", "triton", "reference")
HEAD_SIZES = (32, 64, 128)  # of the Triton kernels
# Triton's own switch: its kernels then run on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_announced: set[str] = set()
_log = logging.getLogger(__name__)


def attend(query, key, value, tiles: Tiles, scale: float, *, backend: str = "auto"):
    """Attention of the local queries over the visiting keys, by the kernel `backend`.

    query [s, b, h, d], key and value [t, b, g, d] with s, t multiples of tiles.block_size and h a multiple of
    g. Returns out [s, b, h, d] and lse [b, h, s] (natural logarithm), both float32 (float64 for float64
    inputs); a row that attends nothing in this step has out 0 and lse -inf. Raises ValueError for a backend
    that is unknown or cannot run here.
    """
    return _kernels(backend, query, tiles).attend(query, key, value, tiles, scale)


def attend_backward(
    grad_out, query, key, value, out, lse, tiles: Tiles, scale: float, *, delta=None, backend="auto"
):
    """Gradients of one ring step: dq [s, b, h, d], dk and dv [t, b, g, d], float32 or float64.

    `out` and `lse` are those of the softmax over all ring steps. `delta` is row_delta(grad_out, out), [b, h,
    s], for callers that run several steps; it is computed when missing.
    """
    kernels = _kernels(backend, query, tiles)
    return kernels.attend_backward(grad_out, query, key, value, out, lse, tiles, scale, delta=delta)


def row_delta(grad_out, out, *, backend: str = "auto") -> torch.Tensor:
    """rowsum(grad_out * out) as [b, h, s], float32 or float64: the term that every dS of a row shares."""
    return _kernels(backend, grad_out).row_delta(grad_out, out)


def _kernels(backend: str, query: torch.Tensor, tiles: Tiles | None = None):
    """The module that runs `backend`, announced the first time. Raises ValueError when it cannot run here."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    chosen = backend
    if backend == "auto":
        fits = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] in HEAD_SIZES
        chosen = "triton" if query.is_cuda and fits else "reference"
    if chosen not in _announced:
        _announced.add(chosen)
        _log.info("attention kernels: %s on %s, %s", chosen, query.device.type, query.dtype)
    if chosen == "reference":
        return reference
    if not query.is_cuda and not INTERPRETED:
        raise ValueError(f"backend {chosen!r} needs tensors on a GPU; these are on {query.device}. Use auto")
    from . import rectangle, triton_backend  # only where they can run: importing them needs Triton

    dense = tiles is not None and tiles.rectangle is not None and tiles.first_key is None
    return rectangle if dense and backend == "auto" else triton_backend
