import pytest
import torch

from megatron_mtrain import make_layout

SIZES = [(1, 4), (2, 4), (3, 2), (4, 8), (8, 2)]


@pytest.mark.parametrize("name", ["zigzag", "stripe"])
@pytest.mark.parametrize(("world_size", "block_size"), SIZES)
def test_every_token_lives_in_one_place(name, world_size, block_size):
    layout = make_layout(name, 4 * world_size * block_size, world_size, block_size)
    everywhere = torch.cat([layout.positions(rank) for rank in range(world_size)])
    assert sorted(everywhere.tolist()) == list(range(layout.num_tokens))
    assert {len(layout.positions(rank)) for rank in range(world_size)} == {layout.local_tokens}


@pytest.mark.parametrize("name", ["zigzag", "stripe"])
def test_local_order_keeps_global_order_and_whole_blocks(name):
    layout = make_layout(name, 384, 4, 8)
    for rank in range(4):
        positions = layout.positions(rank)
        assert torch.equal(positions, positions.sort().values)
        starts = positions.view(-1, 8)
        assert torch.equal(starts, starts[:, :1] + torch.arange(8))
        assert torch.equal(starts[:, 0] // 8, layout.blocks(rank))


def test_the_drawn_example():
    stripe, zigzag = (make_layout(name, 8, 4, 1) for name in ("stripe", "zigzag"))
    assert [stripe.blocks(rank).tolist() for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [zigzag.blocks(rank).tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("name", ["zigzag", "stripe"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unshard_inverts_shard(name, dim):
    layout = make_layout(name, 96, 3, 8)
    shape = [2, 3, 5]
    shape[dim] = 96
    tensor = torch.randn(shape)
    shards = [layout.shard(tensor, dim, rank) for rank in range(3)]
    assert torch.equal(layout.unshard(shards, dim), tensor)


@pytest.mark.parametrize(
    ("name", "tokens", "world", "block", "message"),
    [
        ("stripe", 500000, 8, 128, "sequence length 500000 .* = 1024 .*nearest 499712 or 500736"),
        ("zigzag", 3072, 8, 128, r"3072 .*size 8 \* 2 \* block 128 = 2048 .*nearest 2048 or 4096"),
        ("stripe", 100, 1, 128, "nearest 128"),
        ("spiral", 1024, 1, 128, "unknown layout 'spiral'; layouts are zigzag, stripe"),
        ("stripe", 1024, 0, 128, "world_size 0 must be at least 1"),
    ],
)
def test_refuses(name, tokens, world, block, message):
    with pytest.raises(ValueError, match=message):
        make_layout(name, tokens, world, block)


def test_refuses_wrong_shards():
    layout = make_layout("stripe", 64, 2, 8)
    with pytest.raises(ValueError, match="has 32 tokens; this layout is for 64"):
        layout.shard(torch.zeros(32, 2), 0, 0)
    with pytest.raises(ValueError, match="rank 2 is outside"):
        layout.positions(2)
    with pytest.raises(ValueError, match="got 1 shards"):
        layout.unshard([torch.zeros(32)], 0)
