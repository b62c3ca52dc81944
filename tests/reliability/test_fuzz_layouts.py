"""Layouts of drawn sizes: every token lives in one place, in order; other sizes are refused."""

import pytest
import torch
from hypothesis import strategies as st

from megatron_mtrain import make_layout
from tests.reliability.draws import fuzz

NAMES = st.sampled_from(["zigzag", "stripe"])
RANKS = st.integers(1, 9)
BLOCKS = st.integers(1, 17)


def naive_blocks(name, blocks, world_size, rank):
    """The block ids of a rank from the layouts' definitions, by loops."""
    if name == "stripe":
        return [block for block in range(blocks) if block % world_size == rank]
    chunk = blocks // (2 * world_size)
    return [block for block in range(blocks) if block // chunk in (rank, 2 * world_size - 1 - rank)]


def test_layouts_equal_their_definition():
    def check(name, world_size, size, many, width):
        blocks = many * world_size * (2 if name == "zigzag" else 1)
        layout = make_layout(name, blocks * size, world_size, size)
        tensor = torch.arange(layout.num_tokens * width).view(layout.num_tokens, width)
        shards = [layout.shard(tensor, 0, rank) for rank in range(world_size)]
        assert torch.equal(layout.unshard(shards, 0), tensor)
        for rank, shard in enumerate(shards):
            mine = naive_blocks(name, blocks, world_size, rank)
            tokens = [block * size + at for block in mine for at in range(size)]
            assert layout.blocks(rank).tolist() == mine
            assert layout.positions(rank).tolist() == tokens
            assert shard[:, 0].tolist() == [token * width for token in tokens]

    fuzz(1500, check, name=NAMES, world_size=RANKS, size=BLOCKS, many=st.integers(1, 4), width=BLOCKS)


def test_any_size_is_laid_out_or_refused():
    def check(name, tokens, world_size, size):
        unit = world_size * size * (2 if name == "zigzag" else 1)
        if min(tokens, world_size, size) >= 1 and tokens % unit == 0:
            layout = make_layout(name, tokens, world_size, size)
            assert layout.local_tokens * world_size == layout.num_blocks * size == tokens
        else:
            with pytest.raises(ValueError, match=r"at least 1|is not a multiple of .* nearest \d+"):
                make_layout(name, tokens, world_size, size)

    sizes = st.integers(-2, 9)
    fuzz(1500, check, name=NAMES, tokens=st.integers(-3, 300), world_size=sizes, size=sizes)
