"""Softmax statistics and gradients of rows of logits, one read each, in place: no float32 copy of a chunk of
logits.

Legend: n rows (tokens), v columns (vocabulary entries of this rank).
"""

import torch
import triton
import triton.language as tl

COLUMNS = 8192  # logits of a row read at a time


@triton.jit
def row_statistics_kernel(logits, target, lse, picked, columns, COLUMNS: tl.constexpr):
    """lse[row] = log(sum(exp(logits[row]))) and picked[row] = logits[row, target[row]], 0 outside."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    top, total = -float("inf"), 0.0
    for start in range(0, columns, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        x = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    tl.store(lse + row, top + tl.log(total))
    wanted = tl.load(target + row)
    inside = (wanted >= 0) & (wanted < columns)
    tl.store(picked + row, tl.load(logits + wanted, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def logit_gradient_kernel(logits, target, lse, grad, columns, COLUMNS: tl.constexpr):
    """logits[row] = (exp(logits[row] - lse[row]) - (column == target[row])) * grad[row]."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pointers = logits + row * columns + at
    x = tl.load(pointers, mask=at < columns, other=0.0).to(tl.float32)
    hit = (at == tl.load(target + row)).to(tl.float32)
    gradient = (tl.exp(x - tl.load(lse + row)) - hit) * tl.load(grad + row)
    tl.store(pointers, gradient.to(logits.dtype.element_ty), mask=at < columns)


def row_statistics(logits, target) -> tuple[torch.Tensor, torch.Tensor]:
    """(log(sum(exp(row))), logit of the row's target), both float32 [n] (float64 for float64 logits).

    logits [n, v] contiguous, target int64 [n]; a target outside 0 .. v - 1 picks 0.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        lse, picked = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
        row_statistics_kernel[(len(logits),)](
            logits, target, lse, picked, logits.shape[1], COLUMNS=COLUMNS, num_warps=8
        )
        return lse, picked
    wide = logits if logits.dtype == torch.float64 else logits.float()
    inside = (target >= 0) & (target < logits.shape[1])
    picked = wide.gather(1, torch.where(inside, target, 0)[:, None])[:, 0]
    return torch.logsumexp(wide, 1), torch.where(inside, picked, 0)


def logit_gradient_(logits, target, lse, grad) -> torch.Tensor:
    """Turns logits [n, v] into the gradient of sum(grad * cross entropy), in place.

    lse and grad [n] in float32 (float64 for float64 logits); lse may be over more columns than these.
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        grid = (len(logits), triton.cdiv(logits.shape[1], COLUMNS))
        logit_gradient_kernel[grid](logits, target, lse, grad, logits.shape[1], COLUMNS=COLUMNS, num_warps=8)
        return logits
    inside = (target >= 0) & (target < logits.shape[1])
    gradient = torch.exp(logits.to(lse.dtype) - lse[:, None])
    gradient[torch.arange(len(target), device=target.device), torch.where(inside, target, 0)] -= inside.to(
        lse.dtype
    )
    return logits.copy_(gradient * grad[:, None])
