"""Ring steps that are one rectangle of full or causal attention, by torch's fused kernels (cuDNN or flash).

No list of tiles is walked: a library's dense kernel is faster on a dense step. Which rows and keys the
rectangle holds is in `tiles.rectangle`; all other rows see nothing in this step, all other keys are seen by
nobody.

Legend: as in tiles.py.
"""

import torch

ops = torch.ops.aten


def attend(query, key, value, tiles, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """out float32 [s, b, h, d] and lse float32 [b, h, s] of one ring step; see tiles.attend."""
    first, keys, causal = tiles.rectangle
    q, k, v = _heads_first(query[first:], key[:keys], value[:keys])
    settings = {"dropout_p": 0.0, "is_causal": causal, "return_debug_mask": False, "scale": scale}
    if _on_cudnn(query):
        part, part_lse = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, **settings)[:2]
    else:
        part, part_lse = ops._scaled_dot_product_flash_attention(q, k, v, **settings)[:2]
    part_lse = part_lse.view(*part.shape[:3])
    if first == 0:
        return part.permute(2, 0, 1, 3).float().contiguous(), part_lse.contiguous()
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full((*query.shape[1:3], query.shape[0]), -torch.inf, device=query.device)
    out[first:] = part.permute(2, 0, 1, 3)
    lse[..., first:] = part_lse
    return out, lse


def attend_backward(grad_out, query, key, value, out, lse, tiles, scale: float, delta=None):
    """(dq [s, b, h, d], dk, dv [t, b, g, d]) in float32 of one ring step; see tiles.attend_backward.

    The library computes its own delta from grad_out and out.
    """
    first, keys, causal = tiles.rectangle
    grad, q, k, v, o = _heads_first(
        grad_out[first:].to(query.dtype), query[first:], key[:keys], value[:keys], out[first:].to(query.dtype)
    )
    lse = lse[..., first:].contiguous()
    sizes = (q.shape[2], k.shape[2], 0.0, causal)
    if _on_cudnn(query):
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        grads = ops._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, o, lse[..., None], seed, seed, None, None, None, *sizes, scale=scale
        )
    else:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, o, lse, None, None, *sizes, seed, seed, scale=scale
        )
    dq, dk, dv = (gradient.permute(2, 0, 1, 3) for gradient in grads)
    return _padded(dq, query, first, 0), _padded(dk, key, 0, keys), _padded(dv, value, 0, keys)


def _on_cudnn(query) -> bool:
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(query.device) >= (9, 0)


def _heads_first(*tensors):
    """[s, b, h, d] as [b, h, s, d], without a copy."""
    return [tensor.permute(1, 2, 0, 3) for tensor in tensors]


def _padded(gradient, like, first: int, stop: int) -> torch.Tensor:
    """`gradient` of rows `first` .. `stop` (0: the end) as float32, zero for all other rows of `like`."""
    if len(gradient) == len(like):
        return gradient.float().contiguous()
    whole = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    whole[first : stop or None] = gradient
    return whole
