"""Ring attention over a sparse index: the one autograd function.

The query never moves. Keys and values visit; what is attended of them is a list of tiles; the results of the
steps are merged in float32. In the backward the keys' gradients follow their shard home.
"""

from typing import NamedTuple

import torch

from .config import AttentionConfig
from .documents import Documents
from .index import SparseIndex, build_index
from .kernels.merge import merge
from .kernels.tiles import attend, attend_backward, row_delta
from .layouts import Layout
from .passes import Passes
from .ring import Rings, bring_home, communicate, visit, world


def sparse_ring_attention(  # noqa: PLR0913 - a fixed public signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    config: AttentionConfig,
    layout: Layout,
    rings: Rings,
    layer: int = 0,
    softmax_scale: float | None = None,
    documents=None,
    return_index: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, SparseIndex]:
    """Attention of the whole sequence, computed by the ranks of `rings` together.

    query [s, b, h, d], key and value [s, b, g, d] are this rank's shards in the order of `layout`, h a
    multiple of g. `rings` are process groups, inner to outer; an empty list, or groups of one, is a single
    rank and runs the same method. `layer` is zero-based in the whole model; softmax_scale defaults to d **
    -0.5. `documents`, for packed sequences, are cumulative document lengths of the whole sequences (see
    Documents.of, and make them once for many layers): a token then sees its own document only. Returns [s, b,
    h, d] in the dtype of query, and the index when asked for it. Differentiable in query, key and value.
    Raises ValueError when the shapes do not fit the layout, each other, or the method's settings.
    """
    check_shards(query, key, value, layout, rings)
    if documents is not None:
        documents = Documents.of(documents, layout.num_tokens, query.shape[1])
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rings = communicate(rings, config.ring_comm)
    with torch.no_grad():
        index = build_index(
            config, query, key, layout, rings, layer, softmax_scale=scale, documents=documents
        )
    setting = Setting(rings, scale, config.backend, Passes(layer))
    out = ring_attention(query, key, value, index, setting)
    return (out, index.complete(rings)) if return_index else out


class Setting(NamedTuple):
    """Where and how a layer attends: process groups inner to outer, softmax scale, kernels, its passes."""

    rings: Rings
    scale: float
    backend: str
    passes: Passes


def ring_attention(query, key, value, index: SparseIndex, setting: Setting, known=None):
    """Attention over a given index: [s, b, h, d], differentiable in query, key and value.

    `known` is what ring_forward returned for the same tensors, when the caller has it: then only the backward
    visits the shards.
    """
    return _RingAttention.apply(query, key, value, index, setting, known)


@torch.no_grad()
def ring_forward(query, key, value, index: SparseIndex, setting: Setting):
    """The forward alone: out [s, b, h, d] in the dtype of query, lse [b, h, s] of the whole softmax."""
    rings, scale, backend, passes = setting
    out = lse = None
    steps = passes.start("forward", index.layout.world_size)
    for source, (visiting_key, visiting_value) in visit((key.contiguous(), value.contiguous()), rings):
        with steps.next():
            step = attend(query, visiting_key, visiting_value, index.tiles(source), scale, backend=backend)
            if out is None:
                out, lse = step
            else:
                merge(out, lse, *step)
    steps.end()
    return out.to(query.dtype), lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, index, setting, known):
        key, value = key.contiguous(), value.contiguous()
        out, lse = known or ring_forward(query, key, value, index, setting)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.index, ctx.setting = index, setting
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        rings, scale, backend, passes = ctx.setting
        delta = row_delta(grad_out, out, backend=backend)
        grad_query = None
        steps = passes.start("backward", ctx.index.layout.world_size)

        def grad(source, shard):
            nonlocal grad_query
            with steps.next():
                tiles = ctx.index.tiles(source, by_key=True)
                dq, dk, dv = attend_backward(
                    grad_out, query, *shard, out, lse, tiles, scale, delta=delta, backend=backend
                )
                grad_query = dq if grad_query is None else grad_query.add_(dq)
            return dk, dv

        grad_key, grad_value = bring_home((key, value), rings, grad)
        steps.end()
        grads = (tensor.to(query.dtype) for tensor in (grad_query, grad_key, grad_value))
        return *grads, None, None, None


def check_shards(query, key, value, layout: Layout, rings: Rings) -> None:
    """Raises ValueError when this rank's tensors do not fit each other, the layout and the rings."""
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape:
        raise ValueError(
            f"query, key, value of shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)} must "
            "be [s, b, heads, d], key and value alike"
        )
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query {list(query.shape)} and key {list(key.shape)} differ in tokens, batch or head size"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key, value are {query.dtype}, {key.dtype}, {value.dtype}; give them one dtype"
        )
    size = world(rings)[1]
    if size != layout.world_size:
        raise ValueError(f"the rings have {size} ranks; the layout is for {layout.world_size}")
    if query.shape[0] != layout.local_tokens:
        raise ValueError(
            f"this rank's shard has {query.shape[0]} tokens; the layout ({layout.num_tokens} tokens on "
            f"{size} ranks) gives {layout.local_tokens}"
        )
