"""The naive oracle: float64 masked attention and masks by loops, written from the methods' definitions alone.

Nothing here calls the package: what a test compares with must not share code with what it checks.

Legend: N tokens, b batch, h query heads, g key heads, d head size, G block size; all global.
"""

import math

import torch


def naive_attention(query, key, value, mask, grad_out, scale=None):
    """Softmax attention and its gradients in float64: (out, dq, dk, dv), shaped like their tensors.

    query, grad_out [N, b, h, d], key and value [N, b, g, d], mask bool [b, h, N, N].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (t.detach().double().clone().requires_grad_() for t in (query, key, value))
    group = q.shape[2] // k.shape[2]
    kk, vv = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("tbhd,ubhd->bhtu", q, kk) * scale
    probability = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
    out = torch.einsum("bhtu,ubhd->tbhd", probability, vv)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out.double())


def dense_mask(batch, heads, num_tokens):
    """u <= t."""
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for t in range(num_tokens):
        mask[t, : t + 1] = True
    return mask.expand(batch, heads, -1, -1)


def minfer_mask(query, key, budgets, *, block_size, last_q, sink_tokens, local_window, scale=None):
    """The vertical-slash mask, bool [b, h, N, N].

    budgets: a list with, per query head, (vertical share or None, vertical cap, slash share or None, slash
    cap).
    """
    num_tokens, batch, heads, size = query.shape
    scale = size**-0.5 if scale is None else scale
    group, probes = heads // key.shape[2], min(last_q, num_tokens)
    mask = torch.zeros(batch, heads, num_tokens, num_tokens, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            probability = _probe(query[:, b, h], key[:, b, h // group], probes, scale)
            vertical, slash = _profiles(probability, num_tokens)
            columns = _select(vertical, *budgets[h][:2]) | set(range(min(sink_tokens, num_tokens)))
            distances = _select(slash, *budgets[h][2:]) | set(range(min(local_window, num_tokens)))
            blocks = {0}
            for distance in distances:
                blocks |= {distance // block_size, -(-distance // block_size)}
            for t in range(num_tokens):
                for u in range(t + 1):
                    mask[b, h, t, u] = (t // block_size - u // block_size) in blocks or u in columns
    return mask


def moba_mask(query, key, *, chunk_size, topk):
    """The mixture-of-block-attention mask, bool [b, h, N, N]."""
    num_tokens, batch, heads, _ = query.shape
    group = heads // key.shape[2]
    mask = torch.zeros(batch, heads, num_tokens, num_tokens, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            keys = key[:, b, h // group].double()
            means = torch.stack([part.mean(0) for part in keys.split(chunk_size)])
            gates = (query[:, b, h].double() @ means.T).tolist()
            for t in range(num_tokens):
                own = t // chunk_size
                ranked = sorted(range(own), key=lambda c: (-gates[t][c], c))  # noqa: B023
                for chunk in [*ranked[: topk - 1], own]:
                    mask[b, h, t, chunk * chunk_size : min((chunk + 1) * chunk_size, t + 1)] = True
    return mask


def xattn_mask(query, key, *, granularity, stride, threshold, norm=1, keep_recent=False, scale=None):
    """The antidiagonal block mask, bool [b, h, N, N]."""
    num_tokens, batch, heads, size = query.shape
    scale = size**-0.5 if scale is None else scale
    group, cells, blocks = heads // key.shape[2], num_tokens // stride, num_tokens // granularity
    per_block = granularity // stride
    mask = torch.zeros(batch, heads, num_tokens, num_tokens, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            q, k = query[:, b, h].double(), key[:, b, h // group].double()
            sums = torch.zeros(cells, cells, dtype=torch.float64)
            for x in range(stride):
                sums += q[stride - 1 - x :: stride] @ k[x::stride].T
            sums = sums * scale / (stride * norm)
            for i in range(cells):
                sums[i, i + 1 :] = -math.inf
            probability = torch.softmax(sums, -1)
            score = probability.view(blocks, per_block, blocks, per_block).sum((1, 3)).tolist()
            for row in range(blocks):
                kept = {0, row} | ({max(row - 1, 0)} if keep_recent else set())
                mass = sum(score[row][block] for block in kept)
                for block in sorted(range(row), key=lambda c: (-score[row][c], c)):  # noqa: B023
                    if block not in kept and mass < threshold * sum(score[row]):
                        kept.add(block)
                        mass += score[row][block]
                for t in range(row * granularity, (row + 1) * granularity):
                    for block in kept:
                        start = block * granularity
                        mask[b, h, t, start : min(start + granularity, t + 1)] = True
    return mask


def _probe(query, key, probes, scale):
    num_tokens = len(query)
    scores = query[num_tokens - probes :].double() @ key.double().T * scale
    for row in range(probes):
        scores[row, num_tokens - probes + row + 1 :] = -math.inf
    return torch.softmax(scores, -1)


def _profiles(probability, num_tokens):
    probes = len(probability)
    vertical, slash = [0.0] * num_tokens, [0.0] * num_tokens
    for row in range(probes):
        position = num_tokens - probes + row
        for u, p in enumerate(probability[row].tolist()[: position + 1]):
            vertical[u] += p / probes
            slash[position - u] += p / probes
    return vertical, slash


def _select(scores, share, cap):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    chosen, mass = set(), 0.0
    for i in order:
        if len(chosen) == cap or (share is not None and mass >= share):
            break
        chosen.add(i)
        mass += scores[i]
    return chosen


def relative_error(actual, expected) -> float:
    """|actual - expected| / |expected| in float64; NaN never passes a comparison with it."""
    expected = expected.double()
    return float((actual.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))
