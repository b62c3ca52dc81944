"""Rotary embedding taken at the layout's positions.

Megatron slices its rotary embedding for zigzag order and ignores position ids. A rank's tokens are in layout
order, so its embedding has to be: the same table, other rows. Frequencies stay float32 from the table to the
rotation.
"""

from functools import lru_cache

import torch

from .config import AttentionConfig
from .layouts import make_layout


def use_layout_positions(models: list, attention: AttentionConfig) -> list:
    """A pre-wrap hook for Megatron's model config: makes each model chunk's rotary embedding follow the
    layout."""
    for model in models:
        rotary = getattr(model, "rotary_pos_emb", None)
        if rotary is not None:
            rotary.forward = rotary_forward(rotary, attention, model.pg_collection.cp)
    return models


def rotary_forward(rotary: torch.nn.Module, attention: AttentionConfig, context_group):
    """A replacement for the forward of Megatron's RotaryEmbedding or YarnRotaryEmbedding.

    It takes the number of tokens of the whole sequence and returns the angles of this rank's tokens, float32
    [s, 1, 1, d]; for YaRN a pair of them and the attention factor. The result is kept, so a run computes it
    once.
    """
    rank, world_size = context_group.rank(), context_group.size()

    @lru_cache(maxsize=4)  # training and evaluation lengths
    def angles_of(num_tokens: int):
        table = rotary.get_emb(num_tokens)
        angles, *factor = table if isinstance(table, tuple) else (table,)
        layout = make_layout(attention.layout, num_tokens, world_size, attention.block_size)
        angles = layout.shard(angles.float(), 0, rank)
        return (angles, *factor) if factor else angles

    def forward(max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None):
        if packed_seq or offset:
            raise ValueError(
                "rotary positions of packed or offset sequences cannot be used; give whole sequences"
            )
        return angles_of(max_seq_len)

    return forward
