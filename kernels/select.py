"""The highest scores of every row, by mass or by number, as a mask: a threshold is found, nothing is sorted.

Scores are not negative, so their bit patterns sort like their values and bit 31 is never set. A pass tries
the sixteen values of the next four bits of the threshold at once, each row in PARTS pieces; the next pass
first settles those bits. A short row is held in registers by one program instead. Of the scores equal to the
threshold the first ones are taken, as many as the budget still wants.

Legend: b batch, h heads, N scores of a row.
"""

import torch
import triton
import triton.language as tl

# 131072 scores, 32 rows: one program a row is bound by load latency; 16 pieces a row fill the GPU.
PARTS = 16
SHORT = 8192  # scores of a row that one program holds in registers: one read instead of one a pass
CHUNK = 256  # 16 thresholds x 256 scores: sums stay in registers until the end
PASSES = 8


@triton.jit
def _digits(step):
    """Values that the bits of a pass can take: the first has three bits below the sign, the others four."""
    return tl.where(step == 0, 8, 16)


@triton.jit
def _settle(state, counts, masses, row, rows, wanted, limit, step, PARTS: tl.constexpr):
    """(threshold, number above it, mass above it) once pass `step` has been counted."""
    threshold = tl.load(state + step * rows + row)
    above_count = tl.load(counts + (step * rows + row) * (PARTS + 1) * 16 + PARTS * 16)
    above_mass = tl.load(masses + (step * rows + row) * (PARTS + 1) * 16 + PARTS * 16)
    digits = tl.arange(0, 16)
    at = ((step * rows + row) * (PARTS + 1) + tl.arange(0, PARTS)[:, None]) * 16 + digits[None, :]
    count = tl.sum(tl.load(counts + at), 0)
    mass = tl.sum(tl.load(masses + at), 0)
    reached = ((count >= limit) | (mass >= wanted)) & (digits < _digits(step))
    digit = tl.max(tl.where(reached, digits, 0), 0)
    # Above the threshold is what the next digit reaches; past the last digit it is what was above before.
    beyond = digits == digit + 1
    if digit < 15:
        above_count = tl.sum(tl.where(beyond, count, 0), 0)
        above_mass = tl.sum(tl.where(beyond, mass, 0.0), 0)
    return threshold + (digit << (28 - 4 * step)), above_count, above_mass


@triton.jit
def count_kernel(scores, share, cap, state, counts, masses, length, rows, part_length, step,
                 PARTS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Counts and sums the scores of one piece of a row that reach each of the sixteen thresholds of pass
    `step`."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    threshold, above_count, above_mass = 0, 0, tl.zeros([], dtype=tl.float64)
    if step > 0:
        threshold, above_count, above_mass = _settle(
            state, counts, masses, row, rows, tl.load(share + row), tl.load(cap + row), step - 1, PARTS
        )
    base = (step * rows + row) * (PARTS + 1) * 16
    if part == 0:
        tl.store(state + step * rows + row, threshold)
        tl.store(counts + base + PARTS * 16, above_count)
        tl.store(masses + base + PARTS * 16, above_mass)
    digits = tl.arange(0, 16)
    trial = threshold + (digits << (28 - 4 * step))
    valid = digits < _digits(step)
    count = tl.zeros([16, CHUNK], dtype=tl.int32)
    mass = tl.zeros([16, CHUNK], dtype=tl.float32)
    end = tl.minimum((part + 1) * part_length, length)
    for start in range(part * part_length, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(scores + row * length + at, mask=at < end, other=-1.0)
        # -1 past the end has its sign bit set: below every threshold.
        taken = (x.to(tl.int32, bitcast=True)[None, :] >= trial[:, None]) & valid[:, None]
        count += taken.to(tl.int32)
        mass += tl.where(taken, x[None, :], 0.0)
    tl.store(counts + base + part * 16 + digits, tl.sum(count, 1))
    tl.store(masses + base + part * 16 + digits, tl.sum(mass.to(tl.float64), 1))


@triton.jit
def ties_kernel(scores, share, cap, state, counts, masses, ties, left, length, rows, part_length, step,
                PARTS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Writes the final threshold, how many scores equal to it are wanted, and how many each piece of a row
    has."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted, limit = tl.load(share + row), tl.load(cap + row)
    threshold, above_count, above_mass = _settle(
        state, counts, masses, row, rows, wanted, limit, step - 1, PARTS
    )
    if part == 0:
        level = threshold.to(tl.float32, bitcast=True).to(tl.float64)
        lacking = tl.where(
            above_mass < wanted, tl.ceil((wanted - above_mass) / tl.maximum(level, 1e-300)), 0.0
        )
        tl.store(state + step * rows + row, threshold)
        tl.store(left + row, tl.minimum((limit - above_count).to(tl.float64), lacking).to(tl.int32))
    equal = tl.zeros([CHUNK], dtype=tl.int32)
    end = tl.minimum((part + 1) * part_length, length)
    for start in range(part * part_length, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(scores + row * length + at, mask=at < end, other=-1.0).to(tl.int32, bitcast=True)
        equal += (x == threshold).to(tl.int32)
    tl.store(ties + row * PARTS + part, tl.sum(equal, 0))


@triton.jit
def mask_kernel(scores, state, ties, left, mask, length, rows, part_length, step,
                PARTS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Writes the mask of one piece of a row: above the threshold, or one of the first wanted equal scores."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    threshold = tl.load(state + step * rows + row)
    parts = tl.arange(0, PARTS)
    before = tl.sum(tl.where(parts < part, tl.load(ties + row * PARTS + parts), 0), 0)
    remaining = tl.load(left + row) - before
    end = tl.minimum((part + 1) * part_length, length)
    for start in range(part * part_length, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(scores + row * length + at, mask=at < end, other=-1.0).to(tl.int32, bitcast=True)
        equal = (x == threshold).to(tl.int32)
        keep = (x > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= remaining))
        tl.store(mask + row * length + at, keep, mask=at < end)
        remaining -= tl.sum(equal, 0)


@triton.jit
def short_rows_kernel(scores, share, cap, mask, length, LENGTH: tl.constexpr):
    """The mask of one whole row, held in registers: the threshold is found a bit at a time."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, LENGTH)
    wanted, limit = tl.load(share + row), tl.load(cap + row)
    score = tl.load(scores + row * length + at, mask=at < length, other=-1.0)
    x = score.to(tl.int32, bitcast=True)
    threshold = 0
    for bit in range(31):
        trial = threshold | (1 << (30 - bit))
        count = tl.sum((x >= trial).to(tl.int32), 0)
        mass = tl.sum(tl.where(x >= trial, score, 0.0).to(tl.float64), 0)
        threshold = tl.where((count >= limit) | (mass >= wanted), trial, threshold)
    above = tl.sum((x > threshold).to(tl.int32), 0)
    mass = tl.sum(tl.where(x > threshold, score, 0.0).to(tl.float64), 0)
    level = threshold.to(tl.float32, bitcast=True).to(tl.float64)
    lacking = tl.where(mass < wanted, tl.ceil((wanted - mass) / tl.maximum(level, 1e-300)), 0.0)
    left = tl.minimum((limit - above).to(tl.float64), lacking).to(tl.int32)
    equal = (x == threshold).to(tl.int32)
    keep = (x > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= left))
    tl.store(mask + row * length + at, keep, mask=at < length)


def select(scores, share, cap) -> torch.Tensor:
    """The highest scores of every row: bool, shaped like `scores`.

    scores [rows, N] of at least 0; share float64 [rows] (inf: no bound by mass) and cap int32 [rows].
    Descending, ties to the lower position, an entry is kept while the mass before it is below its row's share
    (so the one that crosses it is kept) and fewer than cap are kept. The mass is summed in float64.
    """
    if not scores.is_cuda or scores.dtype != torch.float32:
        return select_by_sorting(scores, share, cap)
    return select_by_threshold(scores, share, cap)


def select_by_sorting(scores, share, cap) -> torch.Tensor:
    """`select` by its definition."""
    ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    before = ranked.double().cumsum(-1) - ranked
    place = torch.arange(scores.shape[-1], device=scores.device)
    keep = (before < share[:, None]) & (place < cap[:, None])
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, keep)


def select_by_threshold(scores, share, cap) -> torch.Tensor:
    """`select` without sorting, for float32 scores; no host synchronisation."""
    rows, length = scores.shape
    mask = torch.empty_like(scores, dtype=torch.bool)
    if length <= SHORT:
        padded = triton.next_power_of_2(length)
        warps = max(1, padded // 1024)  # 32 scores a thread; up to 1024 of them need no barrier
        short_rows_kernel[(rows,)](scores, share, cap, mask, length, LENGTH=padded, num_warps=warps)
        return mask
    part_length = triton.cdiv(triton.cdiv(length, PARTS), CHUNK) * CHUNK
    new = scores.new_empty
    state = new(PASSES + 1, rows, dtype=torch.int32)
    counts = new(PASSES, rows, PARTS + 1, 16, dtype=torch.int32)
    masses = new(PASSES, rows, PARTS + 1, 16, dtype=torch.float64)
    ties, left = new(rows, PARTS, dtype=torch.int32), new(rows, dtype=torch.int32)
    sizes = {"length": length, "rows": rows, "part_length": part_length, "PARTS": PARTS, "CHUNK": CHUNK}
    grid = (rows, PARTS)
    for step in range(PASSES):
        count_kernel[grid](scores, share, cap, state, counts, masses, step=step, **sizes)
    ties_kernel[grid](scores, share, cap, state, counts, masses, ties, left, step=PASSES, **sizes)
    mask_kernel[grid](scores, state, ties, left, mask, step=PASSES, **sizes)
    return mask
