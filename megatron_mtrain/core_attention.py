"""SparseRingAttention: distributed sparse attention behind Megatron's core_attention contract.

Legend: s tokens of this rank, b batch, h query heads of this rank, g key heads of this rank, d head dim, W
context-parallel ranks. The module has no parameters and adds nothing to a checkpoint.
"""

import torch
from megatron.core.transformer.module import MegatronModule

from .attention import sparse_ring_attention
from .config import AttentionConfig
from .layouts import make_layout


class SparseRingAttention(MegatronModule):
    """Attention over the tokens of all context-parallel ranks, this rank's part of them in and out.

    Built by Megatron from a layer spec; `attention` comes from the spec's params. Raises ValueError when the
    process groups do not fit the parallel sizes: without this check a missing group would quietly train every
    rank on its own tokens alone.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type=None,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection=None,
        *,
        attention: AttentionConfig,
    ):
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(
                f"attention type {attention_type!r} cannot run here; only causal self attention can"
            )
        self.attention = attention
        self.layer = layer_number - 1  # Megatron counts from 1, across pipeline stages
        self.softmax_scale = softmax_scale
        self.world_size = config.context_parallel_size
        self.rings = attention_rings(pg_collection, self.world_size, two_level=attention.two_level)
        self.tensor_rank = pg_collection.tp.rank() if getattr(pg_collection, "tp", None) is not None else 0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """query [s, b, h, d], key and value [s, b, g, d] in layout order -> [s, b, h * d].

        Attention is causal by position; a mask, a bias or packed sequences raise ValueError.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("an attention mask or bias cannot be used: this attention is causal by position")
        if packed_seq_params is not None and packed_seq_params.qkv_format != "sbhd":
            raise ValueError(
                f"packed sequences ({packed_seq_params.qkv_format}) cannot be used; give whole ones"
            )
        num_tokens = query.size(0) * self.world_size
        layout = make_layout(self.attention.layout, num_tokens, self.world_size, self.attention.block_size)
        # Head counts come from the tensors: Megatron rewrites the config when there are fewer key heads than
        # ranks.
        out = sparse_ring_attention(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            config=self.attention.with_heads(self.tensor_rank * query.size(2)),
            layout=layout,
            rings=self.rings,
            layer=self.layer,
            softmax_scale=self.softmax_scale,
        )
        return out.flatten(2)


def attention_rings(pg_collection, world_size: int, *, two_level: bool) -> list:
    """The process groups that key and value travel on, inner to outer, for `world_size` context-parallel
    ranks.

    One group for a flat ring, two for a two-level ring, none for a single rank. Raises ValueError when a
    group is missing or has another size.
    """
    if world_size == 1:
        return []
    if not two_level:
        rings, flag = [getattr(pg_collection, "cp", None)], "--context-parallel-size"
    else:
        rings = list(getattr(pg_collection, "hcp", None) or [None])
        flag = "--hierarchical-context-parallel-sizes INNER OUTER"
    if None in rings:
        raise ValueError(
            f"no process groups for {world_size} context-parallel ranks; start Megatron with {flag}"
        )
    sizes = [group.size() for group in rings]
    if torch.Size(sizes).numel() != world_size or (two_level and len(rings) != 2):
        raise ValueError(
            f"context-parallel groups of sizes {sizes} do not make {world_size} ranks"
            f"{' on two levels' if two_level else ''}; set {flag} to match --context-parallel-size"
        )
    return rings
