"""Attention of routed query rows, forward and backward, in Triton: on top of the tiles of a step (Routes).

Forward and dQ take one launch per run, in order. The rows of a run are unique in a head, so a program reads
the running result of its rows, goes on with the run's keys and writes it back: no atomics, and a fixed
order of additions. One launch for all runs would need either a partial result per route (11 times the
output for 12 chunks a row) or tiles of rows that attend the union of their runs; this way a row is read and
written once per run, by its bytes 7 % of the forward at most at runs of 4096 keys. dK and dV take one
launch: a program owns a tile of keys and loops over the rows that were sent to its run, of all query heads
of its key head. Rows come in order, so that of several documents the last row of a tile begins last: keys
from there on take no mask.

How many rows a run has is known on the device only. Grids are as large as it may be, and the programs
without rows, which come last, leave at once. Beside the results, memory grows by 8 bytes a route in the
backward, 12 with documents.

Legend: as in block_sparse.py; r runs, e routed rows of a head.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .block_sparse import dkey_step
from .walk import CHECKED, LN_2, LOG2_E, documents, fit, in_registers, matrix, settle

# Largest tile (queries x keys), warps and pipeline stages, for 16 bits. Measured on an H200, bfloat16, 16
# query and 2 key heads of size 128, 131072 tokens, 32 runs, 8.9 routes a row (39 TFLOP in the forward), in
# ms: forward 85; 97 with 8 warps and 3 stages, 101 with 128 keys and 8 warps. dQ 102; 105 with 64 queries,
# 4 warps and 2 stages. dK and dV 151; 145 with 128 keys, 8 warps and 5 stages (timed, its result not
# compared with float64), 170 with 3 stages or 32 queries.
FORWARD = (128, 64, 4, 2)
BACKWARD_QUERY = (128, 64, 8, 4)
BACKWARD_KEY = (64, 64, 4, 3)
BASE_2 = tl.constexpr(LOG2_E)
CHUNK = 1024  # entries that a program puts in order


@triton.jit
def _span(key_start, row_start, run, runs, heads, ROWS: tl.constexpr):
    """(query head, first key, key past the last, first entry, entry past the last) of a program of a run.

    Heads are fastest, so that the programs without rows are the last. No entry when there is no key.
    """
    head = tl.program_id(0) % heads
    start, stop = tl.load(key_start + run), tl.load(key_start + run + 1)
    begin = tl.load(row_start + head * (runs + 1) + run) + tl.program_id(0) // heads * ROWS
    end = tl.load(row_start + head * (runs + 1) + run + 1)
    return head, start, stop, begin, tl.where(start < stop, end, begin)


@triton.jit
def _rows(row_index, head, begin, end, entries, ROWS: tl.constexpr):
    """Query rows of the entries from `begin` on, and which of them there are; the others are row 0."""
    entry = begin + tl.arange(0, ROWS)
    row = tl.load(row_index + head.to(tl.int64) * entries + entry, mask=entry < end, other=0)
    return row, entry < end


@triton.jit
def _places(row, head, heads, D: tl.constexpr):
    """Offsets of the rows of a head in a matrix [s, b * h * d]."""
    return row.to(tl.int64)[:, None] * (heads * D) + (head * D + tl.arange(0, D))[None, :]


@triton.jit
def _first_keys(first_key, row, inside, head, batch_heads, tokens):
    """The first keys of the rows of a head; 0 for those that are not there."""
    at = (head // batch_heads).to(tl.int64) * tokens + row
    return tl.load(first_key + at, mask=inside, other=0)


@triton.jit
def _hide_earlier(
    scores, at, row_index, head, begin, end, entries, first_key, batch_heads, tokens,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """-inf for the keys from `at` on that lie before the document of their row."""
    # Read again, as at the end of the kernels: few tiles are cut.
    row, inside = _rows(row_index, head, begin, end, entries, ROWS)
    first = _first_keys(first_key, row, inside, head, batch_heads, tokens)
    return tl.where((at + tl.arange(0, TILE))[None, :] < first[:, None], float("-inf"), scores)


@triton.jit(do_not_specialize=["run"])
def routed_forward_kernel(
    query, key, value, out, lse, key_start, row_start, row_index, first_key, batch_heads, run, runs, heads,
    tokens, entries, qk_scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, start, stop, begin, end = _span(key_start, row_start, run, runs, heads, ROWS)
    if begin >= end:
        return
    row, inside = _rows(row_index, head, begin, end, entries, ROWS)
    q = tl.load(query + _places(row, head, heads, D))
    before = tl.load(lse + head.to(tl.int64) * tokens + row, mask=inside, other=float("-inf"))
    # The running result is where the online softmax stands: nothing is left to merge at the end.
    seen = before != float("-inf")
    bound = 0
    if first_key is not None:
        bound = tl.max(_first_keys(first_key, row, inside, head, batch_heads, tokens), 0)
    top = tl.where(seen, before * BASE_2, -1e30)
    # Spread over the threads of a row, as long as the loop runs.
    total = tl.where(seen[:, None] & (tl.arange(0, 8) == 0)[None, :], 1.0, 0.0)
    acc = tl.load(out + _places(row, head, heads, D), mask=inside[:, None], other=0.0)
    column = head // GROUP * D
    for at in range(start, stop, TILE):
        scores = tl.dot(q, key.load([at, column]).T, input_precision="ieee")
        if first_key is not None and at < bound:
            scores = _hide_earlier(
                scores, at, row_index, head, begin, end, entries, first_key, batch_heads, tokens, ROWS, TILE
            )
        v = value.load([at, column])
        new_top = tl.maximum(top, tl.max(scores, 1) * qk_scale)
        p = tl.exp2(scores * qk_scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade[:, None] + tl.sum(tl.reshape(p, [ROWS, TILE // 8, 8]), 1)
        acc = settle(tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee"))
        top = new_top
    total = tl.sum(total, 1)
    # Read again: held over the loop, rows and their addresses would take registers from the product.
    row, inside = _rows(row_index, head, begin, end, entries, ROWS)
    if first_key is not None:  # a row may have seen nothing yet, and nothing here
        inside &= total != 0
    tl.store(out + _places(row, head, heads, D), acc / total[:, None], mask=inside[:, None])
    tl.store(lse + head.to(tl.int64) * tokens + row, (top + tl.log2(total)) * LN_2, mask=inside)


@triton.jit(do_not_specialize=["run"])
def routed_dquery_kernel(
    query, key, value, grad_out, lse, delta, dquery, key_start, row_start, row_index, first_key,
    batch_heads, run, runs, heads, tokens, entries, qk_scale, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, start, stop, begin, end = _span(key_start, row_start, run, runs, heads, ROWS)
    if begin >= end:
        return
    row, inside = _rows(row_index, head, begin, end, entries, ROWS)
    q = in_registers(tl.load(query + _places(row, head, heads, D)), D)
    do = in_registers(tl.load(grad_out + _places(row, head, heads, D)), D)
    row_lse = tl.load(lse + head.to(tl.int64) * tokens + row)
    row_delta = tl.load(delta + head.to(tl.int64) * tokens + row)
    bound = 0
    if first_key is not None:
        bound = tl.max(_first_keys(first_key, row, inside, head, batch_heads, tokens), 0)
    acc = tl.zeros([ROWS, D], tl.float32)
    column = head // GROUP * D
    for at in range(start, stop, TILE):
        k = key.load([at, column])
        v = value.load([at, column])
        scores = tl.dot(q, k.T, input_precision="ieee")
        if first_key is not None and at < bound:
            scores = _hide_earlier(
                scores, at, row_index, head, begin, end, entries, first_key, batch_heads, tokens, ROWS, TILE
            )
        dp = tl.dot(do, v.T, input_precision="ieee")
        ds = tl.exp2(scores * qk_scale - row_lse[:, None]) * (dp - row_delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
        if not (CHECKED and D == 128):  # as in block_sparse.dquery_kernel
            acc = settle(acc)
    row, inside = _rows(row_index, head, begin, end, entries, ROWS)
    to = dquery + _places(row, head, heads, D)
    tl.store(to, tl.load(to, mask=inside[:, None], other=0.0) + acc * scale, mask=inside[:, None])


@triton.jit
def _place(begin, run, ROWS: tl.constexpr):
    """Where the entries of a run begin when every run begins at a multiple of ROWS."""
    return (begin + run * (ROWS - 1) + ROWS - 1) // ROWS * ROWS


@triton.jit
def in_routed_order_kernel(
    lse, delta, routed_lse, routed_delta, routed_first, row_start, row_index, first_key, batch_heads, runs,
    tokens, entries, places,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """lse, delta and first keys by entry, a run in whole tiles of ROWS: its last tile ends in rows of
    probability 0, whose first key is past all keys.
    """
    run, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(row_start + head * (runs + 1) + run)
    end = tl.load(row_start + head * (runs + 1) + run + 1)
    begin = start + tl.program_id(0) * CHUNK
    if begin >= end:
        return
    row, inside = _rows(row_index, head, begin, end, entries, CHUNK)
    at = head.to(tl.int64) * tokens + row
    entry = begin - start + tl.arange(0, CHUNK)
    to = head.to(tl.int64) * places + _place(start, run, ROWS) + entry
    wanted = entry < tl.cdiv(end - start, ROWS) * ROWS
    tl.store(routed_lse + to, tl.load(lse + at, mask=inside, other=float("inf")), mask=wanted)
    tl.store(routed_delta + to, tl.load(delta + at, mask=inside, other=0.0), mask=wanted)
    if first_key is not None:
        first = _first_keys(first_key, row, inside, head, batch_heads, tokens)
        tl.store(routed_first + to, tl.where(inside, first, 2**30), mask=wanted)


@triton.jit
def routed_dkey_kernel(
    query, key, value, grad_out, routed_lse, routed_delta, routed_first, dkey, dvalue, order, run_of,
    row_start, row_index, runs, key_heads, entries, places, tiles, qk_scale, scale,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    work = tl.load(order + tl.program_id(0))
    key_head, tile = work // tiles, work % tiles
    run = tl.load(run_of + tile)
    if run >= runs:
        return
    heads = key_heads * GROUP
    k = key.load([tile * TILE, key_head * D])
    v = value.load([tile * TILE, key_head * D])
    dk = tl.zeros([TILE, D], tl.float32)
    dv = tl.zeros([TILE, D], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        begin = tl.load(row_start + head * (runs + 1) + run)
        end = tl.load(row_start + head * (runs + 1) + run + 1)
        place = _place(begin, run, ROWS) - begin
        bound = None
        if routed_first is not None:
            firsts = routed_first + head.to(tl.int64) * places + place
            bound = tl.load(firsts + begin + ROWS - 1, mask=begin < end, other=0)
        for at in range(begin, end, ROWS):
            # Rows are read two steps ahead and what belongs to them one, by the pipeliner: it takes 3 stages.
            row, _ = _rows(row_index, head, at, end, entries, ROWS)
            q = tl.load(query + _places(row, head, heads, D))
            do = tl.load(grad_out + _places(row, head, heads, D))
            row_lse = tl.reshape(routed_lse.load([head, place + at]), [ROWS])
            row_delta = tl.reshape(routed_delta.load([head, place + at]), [ROWS])
            scores = tl.dot(k, q.T, input_precision="ieee")
            if routed_first is not None:
                if bound > tile * TILE:
                    keys = tile * TILE + tl.arange(0, TILE)[:, None]
                    first = tl.load(firsts + at + tl.arange(0, ROWS)[None, :])
                    scores = tl.where(keys < first, float("-inf"), scores)
                bound = tl.load(firsts + at + 2 * ROWS - 1, mask=at + ROWS < end, other=0)
            dk, dv = dkey_step(scores, q, v, do, row_lse, row_delta, dk, dv, qk_scale)
    to = _places(tile * TILE + tl.arange(0, TILE), key_head, key_heads, D)
    tl.store(dkey + to, tl.load(dkey + to) + dk * scale)
    tl.store(dvalue + to, tl.load(dvalue + to) + dv)


def add_forward(query, key, value, out, lse, tiles, scale: float) -> None:
    """Merges the routed keys into out float32 [s, b, h, d] and lse float32 [b, h, s] (natural), in place.

    query [s, b, h, d], key and value [t, b, g, d], contiguous. A row that has seen nothing yet has out 0 and
    lse -inf.
    """
    if not tiles.routes.row_index.numel():
        return
    rows, tile, warps, stages = fit(FORWARD, tiles, query)
    arguments, runs, grid = _launch(query, key, tiles, rows)
    matrices = matrix(key, tile), matrix(value, tile)
    for run in range(runs):
        routed_forward_kernel[grid](
            query, *matrices, out, lse, *tiles.routes, run=run, **arguments, qk_scale=scale * LOG2_E,
            ROWS=rows, TILE=tile, num_warps=warps, num_stages=stages,
        )  # fmt: skip


def add_backward_query(grad_out, query, key, value, lse, delta, dquery, tiles, scale: float) -> None:
    """Adds the routed part to dquery float32 [s, b, h, d], in place.

    lse [b, h, s] from `block_sparse.base_2` and delta [b, h, s], both of the softmax over all ring steps.
    """
    if not tiles.routes.row_index.numel():
        return
    rows, tile, warps, stages = fit(BACKWARD_QUERY, tiles, query)
    arguments, runs, grid = _launch(query, key, tiles, rows)
    matrices = matrix(key, tile), matrix(value, tile)
    for run in range(runs):
        routed_dquery_kernel[grid](
            query, *matrices, grad_out, lse, delta, dquery, *tiles.routes, run=run, **arguments,
            qk_scale=scale * LOG2_E, scale=scale, ROWS=rows, TILE=tile, num_warps=warps, num_stages=stages,
        )  # fmt: skip


def add_backward_key(grad_out, query, key, value, lse, delta, dkey, dvalue, tiles, scale: float) -> None:
    """Adds the routed part to dkey and dvalue float32 [t, b, g, d], in place; see `add_backward_query`."""
    if not tiles.routes.row_index.numel():
        return
    rows, tile, warps, stages = fit(BACKWARD_KEY, tiles, query)
    key_start, row_start, row_index = tiles.routes
    (s, b, h, d), (t, _, g, _) = query.shape, key.shape
    runs, entries = len(key_start) - 1, row_index.shape[-1]
    places = triton.cdiv(entries + runs * rows, rows) * rows
    routed_lse = torch.empty(b, h, places, dtype=torch.float32, device=key.device)
    routed_delta = torch.empty_like(routed_lse)
    routed_first = None
    if tiles.first_key is not None:
        routed_first = torch.empty(b, h, places, dtype=torch.int32, device=key.device)
    in_routed_order_kernel[(triton.cdiv(min(s, entries), CHUNK), runs, b * h)](
        lse,
        delta,
        routed_lse,
        routed_delta,
        routed_first,
        row_start,
        row_index,
        **_documents(tiles),
        runs=runs,
        tokens=s,
        entries=entries,
        places=places,
        ROWS=rows,
        CHUNK=CHUNK,
    )
    first = torch.arange(0, t, tile, dtype=torch.int32, device=key.device)
    run_of = torch.searchsorted(key_start[1:].contiguous(), first, right=True).int()
    # Longest first: a run that every row wants must not start last. Its tiles stay together and share rows.
    length = torch.nn.functional.pad(row_start.diff().view(b * g, -1, runs).sum(1), (0, 1))
    order = torch.argsort(length[:, run_of].flatten(), descending=True, stable=True).int()
    routed_dkey_kernel[(b * g * len(first),)](
        query, matrix(key, tile), matrix(value, tile), grad_out, _by_head(routed_lse, rows),
        _by_head(routed_delta, rows), routed_first, dkey, dvalue, order, run_of, row_start, row_index,
        runs=runs, key_heads=b * g, entries=entries, places=places, tiles=len(first),
        qk_scale=scale * LOG2_E, scale=scale, GROUP=h // g, D=d, ROWS=rows, TILE=tile, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def _by_head(tensor, rows: int) -> TensorDescriptor:
    """[b, h, e] read in pieces of `rows` entries of a head: all heads together may have more than 2^31."""
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), [1, rows])


def _documents(tiles) -> dict:
    """walk.documents, where `heads` are those of all batch entries."""
    return {"first_key": tiles.first_key, "batch_heads": documents(tiles)["heads"]}


def _launch(query, key, tiles, rows: int):
    """Arguments that the kernels share, the number of runs, and the grid that is enough for any run."""
    (s, b, h, d), g = query.shape, key.shape[2]
    runs, entries = len(tiles.routes.key_start) - 1, tiles.routes.row_index.shape[-1]
    shared = {"runs": runs, "heads": b * h, "tokens": s, "entries": entries, "GROUP": h // g, "D": d}
    shared |= _documents(tiles)
    return shared, runs, (triton.cdiv(min(s, entries), rows) * b * h,)
