"""The naive oracle: float64 masked attention and masks by loops, written from the methods' definitions alone.

Nothing here calls the package: what a test compares with must not share code with what it checks. `documents`
of a mask are the borders of the documents, [0, ..., N] for every batch entry; without them a sequence is one.

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


def spans(documents, b, num_tokens):
    """(first, end) of every document of batch entry b."""
    borders = [0, num_tokens] if documents is None else documents[b]
    return list(zip(borders[:-1], borders[1:], strict=True))


def dense_mask(batch, heads, num_tokens, documents=None):
    """u <= t."""
    mask = torch.zeros(batch, heads, num_tokens, num_tokens, dtype=torch.bool)
    for b in range(batch):
        for first, end in spans(documents, b, num_tokens):
            for t in range(first, end):
                mask[b, :, t, first : t + 1] = True
    return mask


def minfer_mask(  # noqa: PLR0913 - a method has as many settings
    query, key, budgets, *, block_size, last_q, sink_tokens, local_window, scale=None, documents=None
):
    """The vertical-slash mask, bool [b, h, N, N].

    budgets: a list with, per query head, (vertical share or None, vertical cap, slash share or None, slash
    cap).
    """
    num_tokens, batch, heads, size = query.shape
    scale = size**-0.5 if scale is None else scale
    group = heads // key.shape[2]
    mask = torch.zeros(batch, heads, num_tokens, num_tokens, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for first, end in spans(documents, b, num_tokens):
                rows = slice(first, end)
                length = end - first
                probability = _probe(query[rows, b, h], key[rows, b, h // group], min(last_q, length), scale)
                vertical, slash = _profiles(probability, length)
                columns = _select(vertical, *budgets[h][:2]) | set(range(min(sink_tokens, length)))
                distances = _select(slash, *budgets[h][2:]) | set(range(min(local_window, length)))
                blocks = {0}
                for distance in distances:
                    blocks |= {distance // block_size, -(-distance // block_size)}
                for t in range(first, end):
                    seen = [
                        (t // block_size - u // block_size) in blocks or (u - first) in columns
                        for u in range(first, t + 1)
                    ]
                    mask[b, h, t, first : t + 1] = torch.tensor(seen)
    return mask


def moba_mask(query, key, *, chunk_size, topk, documents=None):
    """The mixture-of-block-attention mask, bool [b, h, N, N]."""
    num_tokens, batch, heads, _ = query.shape
    group = heads // key.shape[2]
    mask = torch.zeros(batch, heads, num_tokens, num_tokens, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            keys = key[:, b, h // group].double()
            for first, end in spans(documents, b, num_tokens):
                start = first // chunk_size
                means = torch.zeros((end - 1) // chunk_size + 1, keys.shape[1], dtype=keys.dtype)
                for c in range(start, len(means)):  # the last one is nobody's past
                    means[c] = keys[max(c * chunk_size, first) : (c + 1) * chunk_size].mean(0)
                gates = (query[:, b, h].double() @ means.T).tolist()
                for t in range(first, end):
                    own = t // chunk_size
                    ranked = sorted(range(start, own), key=lambda c: (-gates[t][c], c))  # noqa: B023
                    for chunk in [*ranked[: topk - 1], own]:
                        low, high = max(chunk * chunk_size, first), min((chunk + 1) * chunk_size, t + 1)
                        mask[b, h, t, low:high] = True
    return mask


def xattn_mask(  # noqa: PLR0913 - a method has as many settings
    query, key, *, granularity, stride, threshold, norm=1, keep_recent=False, scale=None, documents=None
):
    """The antidiagonal block mask, bool [b, h, N, N]."""
    num_tokens, batch, heads, size = query.shape
    scale = size**-0.5 if scale is None else scale
    group, cells, blocks = heads // key.shape[2], num_tokens // stride, num_tokens // granularity
    per_block = granularity // stride
    mask = torch.zeros(batch, heads, num_tokens, num_tokens, dtype=torch.bool)
    for b in range(batch):
        # Where the document of every token begins; a cell belongs to that of its last token.
        begin = [first for first, end in spans(documents, b, num_tokens) for _ in range(first, end)]
        of_cell = begin[stride - 1 :: stride]
        hidden = torch.tensor(
            [[j > i or of_cell[j] != of_cell[i] for j in range(cells)] for i in range(cells)]
        )
        for h in range(heads):
            q, k = query[:, b, h].double(), key[:, b, h // group].double()
            sums = torch.zeros(cells, cells, dtype=torch.float64)
            for x in range(stride):
                sums += q[stride - 1 - x :: stride] @ k[x::stride].T
            sums = sums * scale / (stride * norm)
            sums[hidden] = -math.inf
            probability = torch.softmax(sums, -1)
            for row in range(blocks):
                document = begin[row * granularity]
                start = document // granularity
                cells_of_row = range(row * per_block, (row + 1) * per_block)
                mine = probability[[i for i in cells_of_row if of_cell[i] == document]]
                score = mine.view(-1, blocks, per_block).sum((0, 2)).tolist()
                kept = {start, row} | ({max(row - 1, start)} if keep_recent else set())
                mass = sum(score[block] for block in kept)
                for block in sorted(range(start, row), key=lambda c: (-score[c], c)):  # noqa: B023
                    if block not in kept and mass < threshold * sum(score):
                        kept.add(block)
                        mass += score[block]
                for t in range(row * granularity, (row + 1) * granularity):
                    for block in kept:
                        low, high = max(block * granularity, begin[t]), (block + 1) * granularity
                        mask[b, h, t, low : min(high, t + 1)] = True
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
