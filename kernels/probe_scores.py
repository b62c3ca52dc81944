"""How the last queries of a sequence look at the keys: mean probability by key (vertical) and by distance
(slash).

Two passes over the local keys: `log_mass` gives each probe row's log-sum-exp, which the ranks combine; then
`probe_scores` turns scores into probabilities and reduces them at once, so that no [h, q, t] array exists.
Keys come in blocks of `block_size` consecutive positions. All in float32 (float64 for float64 inputs).

Legend: q probe rows, t local key tokens, n local key blocks, N tokens of the whole sequence, b batch, h query
heads, g key heads, d head size.
"""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
ROWS = 64  # probe rows at a time
TILE = 128  # keys of one tile
PROGRAMS = 264  # two on each of 132 multiprocessors; their scratch is 22 MB, which stays in the L2 cache


@triton.jit
def _tile_scores(
    probe, row, rows, k, keys, first, begin, heads, head, qk_scale,
    D: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 of ROWS probe rows from `row` on over one key tile; -inf where the key is later, or
    before `begin`.
    """
    at = row + tl.arange(0, ROWS)
    pointers = probe + (at[:, None] * heads + head) * D + tl.arange(0, D)[None, :]
    q = tl.load(pointers, mask=at[:, None] < rows, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    seen = (keys[None, :] <= first + at[:, None]) & (at[:, None] < rows)
    if ENTRIES:
        seen = seen & (keys >= begin)[None, :]
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _key_tile(key, starts, tile, pair, pairs, BLOCK: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr):
    """One tile of keys [TILE, D] of the (batch, key head) `pair`, and their global positions."""
    local = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    k = tl.load(key + (local[:, None] * pairs + pair) * D + tl.arange(0, D)[None, :])
    start = tl.load(starts + tile * TILE // BLOCK).to(tl.int32) + tile * TILE % BLOCK
    return k, start, start + tl.arange(0, TILE)


@triton.jit
def _of_entry(starts, first, begin, entry, blocks):
    """Where the blocks, the probe and the keys that count begin in a batch entry."""
    return starts + entry * blocks, tl.load(first + entry).to(tl.int32), tl.load(begin + entry).to(tl.int32)


@triton.jit
def log_mass_kernel(probe, key, starts, part, rows, first, begin, pairs, groups, tiles, qk_scale,
                    GROUP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
                    D: tl.constexpr, ENTRIES: tl.constexpr):  # fmt: skip
    """part[pair * GROUP + head, tile, row] = log2 of the row's sum over one key tile."""
    tile, pair = tl.program_id(0), tl.program_id(1)
    if ENTRIES:
        starts, first, begin = _of_entry(starts, first, begin, pair // groups, tiles * TILE // BLOCK)
    k, _, keys = _key_tile(key, starts, tile, pair, pairs, BLOCK, TILE, D)
    for member in range(GROUP):
        head = pair * GROUP + member
        for row in range(0, rows, ROWS):
            scores = _tile_scores(
                probe, row, rows, k, keys, first, begin, pairs * GROUP, head, qk_scale, D, ROWS, ENTRIES
            )
            top = tl.max(scores, 1)
            safe = tl.where(top == -float("inf"), 0.0, top)
            mass = safe + tl.log2(tl.sum(tl.exp2(scores - safe[:, None]), 1))
            at = row + tl.arange(0, ROWS)
            tl.store(part + (head.to(tl.int64) * tiles + tile) * rows + at, mass, mask=at < rows)


@triton.jit
def probe_scores_kernel(probe, key, starts, lse, vertical, slash, scratch, rows, first, begin, pairs, groups,
                        tiles, num_tokens, qk_scale, GROUP: tl.constexpr, BLOCK: tl.constexpr,
                        TILE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
                        ENTRIES: tl.constexpr):  # fmt: skip
    """Mean probabilities of key tiles: summed over rows, and along the distances that a tile touches.

    A tile of T keys and R <= T rows touches T + R - 1 distances, and two neighbouring tiles share R - 1 of
    them: the last R - 1 go to a second array, so that every element has one writer.

    Sums along distances: rows are written to `scratch` at a pitch of P - 1 and read back at a pitch of P,
    which shifts every row by one more. The margins of a row stay zero, so the reads need no mask and are 16
    bytes wide; with a gather in registers the kernel took 2.3 ms at 131072 tokens, with masked reads 1.3.
    """
    PITCH: tl.constexpr = ROWS + 2 * TILE
    scratch += tl.program_id(0).to(tl.int64) * ROWS * PITCH
    r = tl.arange(0, ROWS)[:, None]
    written = scratch + r * (PITCH - 1) + tl.arange(0, TILE)[None, :] + ROWS
    read = scratch + r * PITCH + tl.arange(0, 2 * TILE)[None, :]  # slot e holds key r + e - ROWS of row r
    along = ROWS - tl.arange(0, 2 * TILE)
    for work in range(tl.program_id(0), tiles * pairs, tl.num_programs(0)):
        tile, pair = work // pairs, work % pairs
        at_starts, at_first, at_begin = starts, first, begin
        if ENTRIES:
            at_starts, at_first, at_begin = _of_entry(
                starts, first, begin, pair // groups, tiles * TILE // BLOCK
            )
        k, start, keys = _key_tile(key, at_starts, tile, pair, pairs, BLOCK, TILE, D)
        for member in range(GROUP):
            head = pair * GROUP + member
            total = tl.zeros([TILE], dtype=tl.float32)
            for row in range(0, rows, ROWS):
                scores = _tile_scores(
                    probe, row, rows, k, keys, at_first, at_begin, pairs * GROUP, head, qk_scale, D, ROWS,
                    ENTRIES,
                )  # fmt: skip
                at = row + tl.arange(0, ROWS)
                mass = tl.load(lse + head * rows + at, mask=at < rows, other=0.0) * 1.4426950408889634
                p = tl.exp2(scores - mass[:, None]) / rows
                total += tl.sum(p, 0)
                tl.debug_barrier()
                tl.store(written, p)
                tl.debug_barrier()
                sums = tl.sum(tl.load(read), 0)
                distance = at_first + row - start + along
                array = (row // ROWS * 2 + (along > 0)).to(tl.int64) * pairs * GROUP + head
                wanted = (distance >= 0) & (distance < num_tokens) & (along < ROWS) & (along > -TILE)
                tl.store(slash + array * num_tokens + distance, sums, mask=wanted)
            local = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
            tl.store(vertical + head.to(tl.int64) * tiles * TILE + local, total)


def log_mass(probe, key, starts, first, scale: float, block_size: int, begin=None) -> torch.Tensor:
    """log(sum(exp(scores))) of every probe row over the local keys: [b, h, q], -inf where all keys are later.

    probe [q, b, h, d], row i at global position first + i; key [t, b, g, d], block j of it at global
    positions from starts[j] on (int64 [n]). With `begin` int64 [b], keys before that position count for
    nothing, and first int64 [b] and starts int64 [b, n] are by batch entry too.
    """
    if not runs_on_triton(key, block_size):
        scores, _ = _scores(probe, key, starts, first, scale, block_size, begin)
        return torch.logsumexp(scores, -1)
    grid, shared = _launch(probe, key, block_size, begin)
    rows, b, h, _ = probe.shape
    part = torch.empty(b * h, grid[0], rows, dtype=torch.float32, device=key.device)
    log_mass_kernel[grid](
        probe, key, starts, part, rows, first, 0 if begin is None else begin, grid[1], key.shape[2], grid[0],
        scale * LOG2_E, **shared, num_warps=4,
    )  # fmt: skip
    return torch.logsumexp(part.mul_(1 / LOG2_E), 1).view(b, h, rows)


def probe_scores(
    probe, key, starts, first, lse, *, scale: float, block_size: int, num_tokens: int, begin=None
):
    """Mean probability over the probe rows, by key and by distance.

    lse [b, h, q] is over the keys of all ranks; the other arguments are those of `log_mass`, and num_tokens
    the number N of distances. Returns vertical [b, h, t], in the order of the local keys, and this rank's
    part of slash [b, h, N]: the sum over ranks is the mean of A[i, first + i - distance].
    """
    if not runs_on_triton(key, block_size):
        scores, distance = _scores(probe, key, starts, first, scale, block_size, begin)
        return _probe_scores_torch(scores, distance, lse, num_tokens)
    grid, shared = _launch(probe, key, block_size, begin)
    rows, b, h, _ = probe.shape
    arrays = 2 * triton.cdiv(rows, shared["ROWS"])
    vertical = torch.empty(b, h, key.shape[0], dtype=torch.float32, device=key.device)
    slash = torch.zeros(arrays, b, h, num_tokens, dtype=torch.float32, device=key.device)
    programs = min(grid[0] * grid[1], PROGRAMS)
    pitch = shared["ROWS"] + 2 * shared["TILE"]
    scratch = torch.zeros(programs, shared["ROWS"], pitch, dtype=torch.float32, device=key.device)
    probe_scores_kernel[(programs,)](
        probe, key, starts, lse.contiguous(), vertical, slash, scratch, rows, first,
        0 if begin is None else begin, grid[1], key.shape[2], grid[0], num_tokens, scale * LOG2_E, **shared,
        num_warps=4,
    )  # fmt: skip
    return vertical, slash.sum(0)


def runs_on_triton(key, block_size: int) -> bool:
    """Whether the Triton kernels take these keys; torch does the rest, and everything on a CPU."""
    whole_tiles = block_size in (16, 32, 64) or block_size % TILE == 0
    return (
        key.is_cuda and key.dtype != torch.float64 and key.shape[-1] in (16, 32, 64, 128, 256) and whole_tiles
    )


def _launch(probe, key, block_size: int, begin):
    t, b, g, d = key.shape
    tile = min(TILE, block_size)
    shared = {
        "GROUP": probe.shape[2] // g,
        "BLOCK": block_size,
        "TILE": tile,
        "ROWS": min(ROWS, tile),
        "D": d,
        "ENTRIES": begin is not None,
    }
    return (t // tile, b * g), shared


def _probe_scores_torch(scores, distance, lse, num_tokens: int):
    probability = torch.exp(scores - lse[..., None])
    rows = scores.shape[2]
    slash = probability.new_zeros(*probability.shape[:2], num_tokens)
    # A key later than the probe, or one that does not count, has probability 0: any distance will do.
    distance = distance.clamp(0, num_tokens - 1)
    for row in range(rows):
        slash.scatter_add_(-1, distance[..., row, :].expand_as(scores[:, :, row]), probability[:, :, row])
    return probability.sum(-2) / rows, slash / rows


def _scores(probe, key, starts, first, scale: float, block_size: int, begin):
    """Scaled scores [b, h, q, t], -inf for keys later than the probe row or before `begin`, and the distances
    of keys from rows, [1 or b, 1, q, t].
    """
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    groups, rows = key.shape[2], probe.shape[0]
    q = probe.to(wide).permute(1, 2, 0, 3).unflatten(1, (groups, -1)).flatten(2, 3)
    scores = (q @ key.to(wide).permute(1, 2, 3, 0)).mul_(scale).unflatten(2, (-1, rows)).flatten(1, 2)
    positions = (starts[..., None] + torch.arange(block_size, device=starts.device)).flatten(-2)
    at = torch.arange(rows, device=starts.device)
    at = at + first if begin is None else at + first[:, None]
    distance = (at[..., None] - positions[..., None, :]).view(-1, 1, rows, positions.shape[-1])
    hidden = distance < 0
    if begin is not None:
        hidden = hidden | (positions < begin[:, None])[:, None, None]
    return scores.masked_fill_(hidden, -torch.inf), distance
