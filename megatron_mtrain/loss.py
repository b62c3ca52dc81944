"""Cross entropy of the output layer, a chunk of tokens at a time: the logits of a sequence never exist.

At 131072 tokens the float32 logits of Qwen's vocabulary would take 80 GB. Here a chunk's logits are made,
reduced to two numbers a token and dropped; the backward makes them again, turns them into their gradient in
place, and multiplies on. The vocabulary may be split over tensor-parallel ranks: only the two numbers a token
are exchanged.

Reference: the recompute form of Liger's fused linear cross entropy (arXiv 2410.10989), which reduces to one
scalar and knows no tensor parallelism; Megatron needs a loss per token.

Legend: s tokens of this rank, b batch, n = s * b, h hidden size, v vocabulary entries of this tensor-parallel
rank.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from .kernels.cross_entropy import logit_gradient_, row_statistics

CHUNK = 2048  # tokens: 0.6 GB of bf16 logits at Qwen's vocabulary


def in_chunks(chunk_size: int) -> dict:
    """Arguments of Megatron's GPTModel.forward that make it compute its loss by `chunked_loss`; 0: none."""
    return {"output_processor": chunked_loss, "output_processor_context": chunk_size} if chunk_size else {}


def chunked_loss(*, hidden_states, output_layer, output_weight, labels, context=None, **_unused):
    """Per-token losses float32 [b, s]: an `output_processor` for Megatron's GPTModel.forward.

    hidden_states [s, b, h] (split over tensor-parallel ranks under sequence parallelism), labels int64 [b,
    s]; output_weight [v, h] is the tied embedding, or None for the output layer's own weight. `context` is
    the number of tokens of a chunk, default CHUNK.
    """
    group = output_layer.tp_group
    if output_layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden_states, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    weight = output_layer.weight if output_weight is None else output_weight
    s, b = hidden.shape[:2]
    target = labels.transpose(0, 1).reshape(-1)
    chunk = context or CHUNK
    losses = linear_cross_entropy(hidden.flatten(0, 1), weight, target, group=group, chunk=chunk)
    return losses.view(s, b).transpose(0, 1).contiguous()


def linear_cross_entropy(hidden, weight, target, *, group=None, chunk: int = CHUNK) -> torch.Tensor:
    """Cross entropy of hidden @ weight.T, float32 [n] (float64 for float64 inputs), differentiable in both.

    hidden [n, h], weight [v, h], target int64 [n] in the whole vocabulary, of which the rank r of `group`
    holds the entries r * v .. r * v + v - 1. Gradients of hidden are this rank's part; they sum over the
    group.
    """
    return _LinearCrossEntropy.apply(hidden, weight, target, group, chunk)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, group, chunk):
        parallel = group is not None and dist.get_world_size(group) > 1
        target = target - dist.get_rank(group) * len(weight) if parallel else target
        parts = [
            row_statistics(hidden[rows] @ weight.T, target[rows]) for rows in _chunks(len(hidden), chunk)
        ]
        lse, picked = (torch.cat(part) for part in zip(*parts, strict=True))
        if parallel:
            lse = _logsumexp_over(lse, group)
            dist.all_reduce(picked, group=group)
        ctx.save_for_backward(hidden, weight, target, lse)
        ctx.chunk = chunk
        return lse - picked

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, target, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype)
        for rows in _chunks(len(hidden), ctx.chunk):
            logits = logit_gradient_(
                hidden[rows] @ weight.T, target[rows], lse[rows], grad[rows].contiguous()
            )
            torch.mm(logits, weight, out=grad_hidden[rows])
            _add_product(grad_weight, logits.T, hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(total: int, chunk: int):
    return (slice(first, min(first + chunk, total)) for first in range(0, total, chunk))


def _add_product(total, left, right) -> None:
    """total += left @ right, accumulated in the dtype of total."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _logsumexp_over(lse, group):
    """log(sum(exp(lse))) over the ranks of `group`."""
    top = lse.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    mass = torch.exp(lse - top)
    dist.all_reduce(mass, group=group)
    return top + torch.log(mass)
