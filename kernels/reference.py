"""Naive attention over the tiles of a ring step: the oracle of every kernel, and the CPU backend.

Softmax over the attended keys only, straight from its definition; rows are taken `ROWS` at a time, so that no
[s, t] array exists. The arithmetic is float32, or float64 for float64 inputs.

Legend: b batch, s query tokens, t key tokens, h query heads, g key heads, d head size, m, n query, key
blocks.
"""

import torch

ROWS = 512  # query tokens at a time: the scores of 4 heads and 4096 keys then take 32 MB


def block_mask(tiles, num_blocks: int) -> torch.Tensor:
    """The listed tiles as bool [b, h, m, num_blocks], for that number of key blocks."""
    count, index = tiles.block_count, tiles.block_index
    slots = torch.arange(index.shape[-1], device=index.device)
    listed = slots < count[..., None]
    mask = torch.zeros(*count.shape, num_blocks, dtype=torch.int32, device=index.device)
    ids = torch.where(listed, index, 0).long()
    return mask.scatter_add_(-1, ids, listed.int()).bool()


def unpack_bits(words: torch.Tensor) -> torch.Tensor:
    """The bits of int32 [..., w] as bool [..., 32 * w], bit i of word w at 32 * w + i."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return (((words[..., None] >> shifts) & 1) != 0).flatten(-2)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_bits`: bool [..., 32 * w] as int32 [..., w]."""
    weights = torch.ones(32, dtype=torch.int32, device=bits.device) << torch.arange(
        32, device=bits.device, dtype=torch.int32
    )
    return (bits.unflatten(-1, (-1, 32)).int() * weights).sum(-1, dtype=torch.int32)


def token_mask(tiles, blocks: slice, listed: torch.Tensor) -> torch.Tensor:
    """Which keys the tokens of the query blocks `blocks` attend: bool [b, h, tokens, t].

    `listed` is block_mask(tiles, n): passed in because it is shared by all row ranges.
    """
    size, (b, h, m, n) = tiles.block_size, listed.shape
    block_rows = listed[:, :, blocks]
    mask = block_rows[:, :, :, None, :, None].expand(-1, -1, -1, size, -1, size).clone()
    if tiles.diagonal:
        causal = torch.ones(size, size, dtype=torch.bool, device=listed.device).tril()
        for at, block in enumerate(range(*blocks.indices(m))):
            mask[:, :, at, :, block] &= causal
    mask = mask.reshape(b, h, block_rows.shape[2] * size, n * size)
    if tiles.columns is not None:
        columns = tiles.columns
        visible = unpack_bits(columns.visible[:, :, blocks])[..., : columns.index.shape[-1]]
        hits = torch.zeros(*block_rows.shape[:3], n * size, dtype=torch.int32, device=listed.device)
        hits.scatter_add_(-1, columns.index[:, :, None].expand_as(visible).long(), visible.int())
        mask |= hits.bool().repeat_interleave(size, dim=2)
    first = blocks.indices(m)[0] * size
    rows = slice(first, first + mask.shape[2])
    if tiles.routes is not None:
        mask |= routed_rows(tiles.routes, rows, n * size)
    if tiles.first_key is not None:
        keys = torch.arange(n * size, device=mask.device)
        mask &= (keys >= tiles.first_key[:, rows, None])[:, None]
    return mask


def routed_rows(routes, rows: slice, num_keys: int) -> torch.Tensor:
    """Which keys the query rows `rows` attend by a route: bool [b, h, rows, t]."""
    b, h, runs = *routes.row_start.shape[:2], routes.row_start.shape[2] - 1
    entry = torch.arange(routes.row_index.shape[-1], dtype=torch.int32, device=routes.row_index.device)
    ends = routes.row_start[..., 1:].contiguous()
    run = torch.searchsorted(ends, entry.expand(b, h, -1).contiguous(), right=True)
    inside = (run < runs) & (routes.row_index >= rows.start) & (routes.row_index < rows.stop)
    place = torch.where(inside, (routes.row_index - rows.start) * runs + run, (rows.stop - rows.start) * runs)
    sent = torch.zeros(b, h, (rows.stop - rows.start) * runs + 1, dtype=torch.bool, device=entry.device)
    sent.scatter_(-1, place.long(), True)
    run_of_key = torch.searchsorted(
        routes.key_start[1:].contiguous(), torch.arange(num_keys, device=entry.device).int(), right=True
    )
    return sent[..., :-1].unflatten(-1, (-1, runs))[..., run_of_key]


def attend(query, key, value, tiles, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the local queries over the visiting keys.

    query [s, b, h, d], key and value [t, b, g, d]. Returns out [s, b, h, d] and lse [b, h, s] (natural
    logarithm), both float32 (float64 for float64 inputs); a row that attends nothing has out 0 and lse -inf.
    """
    out = torch.empty_like(query, dtype=_accumulator(query))
    lse = torch.empty(*query.shape[1:3], query.shape[0], dtype=out.dtype, device=query.device)
    k, v = _per_head(key), _per_head(value)
    for rows, reach, mask in _row_ranges(query, key, tiles):
        scores = _scores(query[rows], k[..., :reach, :], scale).masked_fill_(~mask, -torch.inf)
        row_lse = torch.logsumexp(scores, -1)
        probability = torch.exp_(scores.sub_(_finite(row_lse)[..., None]))
        part = (probability.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ v[..., :reach, :]).unflatten(
            2, (-1, mask.shape[2])
        )
        out[rows] = part.flatten(1, 2).permute(2, 0, 1, 3)
        lse[..., rows] = row_lse
    return out, lse


def attend_backward(grad_out, query, key, value, out, lse, tiles, scale: float, delta=None):
    """Gradients of one ring step: (dq [s, b, h, d], dk, dv [t, b, g, d]), in float32 (float64 for float64
    inputs).

    `out` and `lse` are those of the whole softmax, over all ring steps. delta is rowsum(grad_out * out) as
    [b, h, s] when the caller has it already.
    """
    k, v = _per_head(key), _per_head(value)
    delta = row_delta(grad_out, out) if delta is None else delta
    dq = torch.empty_like(query, dtype=_accumulator(query))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    groups = k.shape[1]
    for rows, reach, mask in _row_ranges(query, key, tiles):
        scores = _scores(query[rows], k[..., :reach, :], scale).masked_fill_(~mask, -torch.inf)
        probability = torch.exp_(scores.sub_(_finite(lse[..., rows])[..., None]))
        do = _grouped(grad_out[rows], groups)
        q = _grouped(query[rows], groups)
        p = probability.unflatten(1, (groups, -1)).flatten(2, 3)
        dv[..., :reach, :] += p.mT @ do
        dscore = p * (
            do @ v[..., :reach, :].mT - delta[..., rows].unflatten(1, (groups, -1)).flatten(2, 3)[..., None]
        )
        dscore *= scale
        dk[..., :reach, :] += dscore.mT @ q
        part = (dscore @ k[..., :reach, :]).unflatten(2, (-1, mask.shape[2]))
        dq[rows] = part.flatten(1, 2).permute(2, 0, 1, 3)
    return dq, dk.permute(2, 0, 1, 3).contiguous(), dv.permute(2, 0, 1, 3).contiguous()


def row_delta(grad_out, out) -> torch.Tensor:
    """rowsum(grad_out * out) as [b, h, s], float32 or float64: the term that every dS of a row shares."""
    wide = _accumulator(grad_out)
    return (grad_out.to(wide) * out.to(wide)).sum(-1).permute(1, 2, 0).contiguous()


def _accumulator(tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _per_head(tensor) -> torch.Tensor:
    return tensor.to(_accumulator(tensor)).permute(1, 2, 0, 3).contiguous()


def _grouped(tensor, groups: int) -> torch.Tensor:
    """[rows, b, h, d] as [b, g, (h / g) * rows, d], so that the query heads of a key head share its keys."""
    rows = tensor.to(_accumulator(tensor)).permute(1, 2, 0, 3)
    return rows.unflatten(1, (groups, -1)).flatten(2, 3)


def _scores(query, k, scale: float) -> torch.Tensor:
    rows = query.shape[0]
    scores = (_grouped(query, k.shape[1]) @ k.mT).mul_(scale)
    return scores.unflatten(2, (-1, rows)).flatten(1, 2)


def _finite(lse) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _row_ranges(query, key, tiles):
    """Row ranges with the number of keys that any of them can reach and their mask over those keys."""
    listed = block_mask(tiles, len(key) // tiles.block_size)
    size, m, n = tiles.block_size, listed.shape[2], listed.shape[3]
    step = max(1, ROWS // size)
    for first in range(0, m, step):
        blocks = slice(first, min(first + step, m))
        mask = token_mask(tiles, blocks, listed)
        reach = n * size
        if query.device.type == "cpu":
            reached = mask.any(dim=(0, 1, 2)).nonzero()
            reach = int(reached[-1]) + 1 if len(reached) else 1
        yield slice(blocks.start * size, blocks.stop * size), reach, mask[..., :reach]
