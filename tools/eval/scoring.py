"""What a model makes of the next token at every position: its loss, and whether it is the most likely one.

Legend: s tokens of this rank, b batch, h hidden size, v vocabulary entries of this tensor-parallel rank.
"""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_mtrain.kernels.cross_entropy import row_statistics
from tools.loaded_model import gather

CHUNK = 2048  # tokens whose logits exist at a time


def score(*, hidden_states, output_layer, output_weight, labels, context, **_unused) -> torch.Tensor:
    """float32 [2, b, s]: loss of every label, and 1 where it is the most likely token, else 0.

    An `output_processor` for Megatron's GPTModel.forward: hidden_states [s, b, h] (split over tensor-parallel
    ranks under sequence parallelism), labels int64 [b, s]. `context` is the size of the vocabulary: entries
    after it only pad it for the number of ranks, and do not count. Of equal logits the lowest id wins.
    """
    group = output_layer.tp_group
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
    weight = output_layer.weight if output_weight is None else output_weight
    s, b = hidden_states.shape[:2]
    target = labels.transpose(0, 1).reshape(-1)
    first = group.rank() * len(weight)
    weight = weight[: max(context - first, 0)]
    parts = [
        _score_rows(rows, weight, wanted - first)
        for rows, wanted in zip(hidden_states.flatten(0, 1).split(CHUNK), target.split(CHUNK), strict=True)
    ]
    lse, picked, top, best = (torch.cat(part) for part in zip(*parts, strict=True))
    lse, picked, top, best = (torch.stack(gather(part, group)) for part in (lse, picked, top, best + first))
    # max() over ranks takes the first of equals: the rank with the lower ids.
    most_likely = best.gather(0, top.argmax(0, keepdim=True))[0]
    scores = torch.stack([torch.logsumexp(lse, 0) - picked.sum(0), (most_likely == target).float()])
    return scores.view(2, s, b).transpose(1, 2).contiguous()


def _score_rows(rows, weight, target) -> tuple[torch.Tensor, ...]:
    """lse, target's logit (0 outside), largest logit and its place, [n] each, of rows [n, h] @ weight.T."""
    if not len(weight):  # a rank with nothing but padding
        nothing = rows.new_full((len(rows),), -torch.inf, dtype=torch.float32)
        return nothing, torch.zeros_like(nothing), nothing, torch.zeros_like(target)
    logits = rows @ weight.T
    top, best = logits.max(1)
    return *row_statistics(logits, target), top.float(), best
