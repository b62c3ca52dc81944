"""Rotary embedding taken at the layout's positions.

Megatron slices its rotary embedding for zigzag order and ignores position ids. A rank's tokens are in layout
order, so its embedding has to be: the same table, other rows. Frequencies stay float32 from the table to the
rotation.

Positions run on through a packed sequence, unless they are to begin again in every document: then each batch
entry has rows of its own.
"""

from functools import lru_cache

import torch

from .config import AttentionConfig
from .documents import Documents
from .layouts import make_layout


def use_layout_positions(models: list, attention: AttentionConfig) -> list:
    """A pre-wrap hook for Megatron's model config: makes each model chunk's rotary embedding follow the
    layout."""
    for model in models:
        rotary = getattr(model, "rotary_pos_emb", None)
        if rotary is not None:
            rotary.forward = rotary_forward(rotary, attention, model.pg_collection.cp)
            rotary.get_rotary_seq_len = length_or_documents(rotary.get_rotary_seq_len)
    return models


def length_or_documents(length):
    """A replacement for get_rotary_seq_len, whose answer Megatron's model hands to the rotary embedding.

    The length of the whole sequence, or its Documents where positions begin again in each.
    """

    def get(context, transformer, hidden, config, packed_seq_params=None, **rest):
        if getattr(packed_seq_params, "restart", False):
            return packed_seq_params.documents
        return length(context, transformer, hidden, config, packed_seq_params, **rest)

    return get


def rotary_forward(rotary: torch.nn.Module, attention: AttentionConfig, context_group):
    """A replacement for the forward of Megatron's RotaryEmbedding or YarnRotaryEmbedding.

    It takes the number of tokens of the whole sequence and returns the angles of this rank's tokens, float32
    [s, 1, 1, d]; for YaRN a pair of them and the attention factor. The result is kept, so a run computes it
    once. Given Documents, it begins again in each: [s, b, 1, d].
    """
    rank, world_size = context_group.rank(), context_group.size()

    def select(num_tokens: int, rows):
        """The angles of the rows that rows(table) takes of the table of num_tokens positions."""
        table = rotary.get_emb(num_tokens)
        angles, *factor = table if isinstance(table, tuple) else (table,)
        angles = rows(angles.float())
        return (angles, *factor) if factor else angles

    def layout_of(num_tokens: int):
        return make_layout(attention.layout, num_tokens, world_size, attention.block_size)

    @lru_cache(maxsize=4)  # training and evaluation lengths
    def angles_of(num_tokens: int):
        return select(num_tokens, lambda table: layout_of(num_tokens).shard(table, 0, rank))

    def angles_in(documents: Documents):
        def rows(table):
            positions = layout_of(documents.num_tokens).positions(rank, table.device)
            return table[(positions - documents.begins(positions)).T, 0]

        return select(documents.longest, rows)

    def forward(max_seq_len: int | Documents, offset: int = 0, packed_seq: bool = False, cp_group=None):
        if packed_seq or offset:
            raise ValueError(
                "rotary positions of packed or offset sequences cannot be used; give whole sequences"
            )
        return (angles_in if isinstance(max_seq_len, Documents) else angles_of)(max_seq_len)

    return forward
