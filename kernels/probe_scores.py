"""How the last queries of a sequence look at the keys: mean probability by key (vertical) and by distance (slash).

Two passes over the local keys: `log_mass` gives each probe row's log-sum-exp, which the ranks combine; then
`probe_scores` turns scores into probabilities and reduces them. All in float32 (float64 for float64 inputs).

Legend: q probe rows, t local key tokens, N tokens of the whole sequence, b batch, h query heads, g key heads.
"""

import torch


def log_mass(probe, key, positions, first: int, scale: float) -> torch.Tensor:
    """log(sum(exp(scores))) of every probe row over the local keys: [b, h, q], -inf where all keys are later.

    probe [q, b, h, d], row i at global position first + i; key [t, b, g, d] at global `positions` int64 [t].
    """
    return torch.logsumexp(_scores(probe, key, positions, first, scale), -1)


def probe_scores(probe, key, positions, first: int, lse, scale: float, num_tokens: int):
    """Mean probability over the probe rows, by key and by distance.

    lse [b, h, q] is over the keys of all ranks. Returns vertical [b, h, t], in the order of the local keys, and
    this rank's part of slash [b, h, N]: the sum over ranks is the mean of A[i, first + i - distance].
    """
    probability = torch.exp(_scores(probe, key, positions, first, scale) - lse[..., None])
    rows = probe.shape[0]
    slash = probability.new_zeros(*probability.shape[:2], num_tokens)
    for row in range(rows):
        distance = first + row - positions
        # A key later than the probe has probability 0: any distance will do.
        slash.index_add_(-1, distance.clamp(min=0), probability[:, :, row])
    return probability.sum(-2) / rows, slash / rows


def _scores(probe, key, positions, first: int, scale: float) -> torch.Tensor:
    """Scaled scores [b, h, q, t], -inf for keys later than the probe row."""
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    groups, rows = key.shape[2], probe.shape[0]
    q = probe.to(wide).permute(1, 2, 0, 3).unflatten(1, (groups, -1)).flatten(2, 3)
    scores = (q @ key.to(wide).permute(1, 2, 3, 0)).mul_(scale).unflatten(2, (-1, rows)).flatten(1, 2)
    later = positions > torch.arange(first, first + rows, device=positions.device)[:, None]
    return scores.masked_fill_(later, -torch.inf)
