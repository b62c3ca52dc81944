"""Lists of tiles and columns, selection and the merge of ring steps, on drawn inputs, against loops."""

import math

import torch
from hypothesis import strategies as st

from megatron_mtrain.kernels.merge import merge
from megatron_mtrain.kernels.reference import unpack_bits
from megatron_mtrain.kernels.select import select
from megatron_mtrain.kernels.tile_lists import Slashes, list_by_key, list_by_query, list_columns
from megatron_mtrain.kernels.tiles import Tiles
from megatron_mtrain.kernels.vertical import with_first_slots
from tests.oracle import _select
from tests.reliability.draws import SEEDS, fuzz

SMALL = st.integers(1, 5)


def generator(seed: int) -> torch.Generator:
    """A generator of its own for every draw."""
    return torch.Generator().manual_seed(seed)


def draw_mask(seed, *shape, density):
    """A bool tensor with about `density` / 4 of its entries on."""
    return torch.rand(*shape, generator=generator(seed)) < density / 4


def test_tile_lists():
    def check(batch, groups, group, m, n, density, seed):
        heads = groups * group
        mask = draw_mask(seed, batch, heads, m, n, density=density)
        count, index = list_by_query(mask)
        key_count, key_index = list_by_key(mask, groups)
        for b in range(batch):
            for h in range(heads):
                for i in range(m):
                    wanted = [j for j in range(n) if mask[b, h, i, j]]
                    assert index[b, h, i, : count[b, h, i]].tolist() == wanted
            for g in range(groups):
                for j in range(n):
                    wanted = [
                        member * m + i
                        for member in range(group)
                        for i in range(m)
                        if mask[b, g * group + member, i, j]
                    ]
                    assert key_index[b, g, j, : key_count[b, g, j]].tolist() == wanted

    sizes = {"batch": st.integers(1, 2), "groups": st.integers(1, 2), "group": st.integers(1, 2)}
    fuzz(1000, check, **sizes, m=SMALL, n=SMALL, density=st.integers(0, 4), seed=SEEDS)


def test_columns():
    """Which blocks see which columns: those of later blocks whose tile is off."""

    def check(world_size, many, size, source, density, seed):
        source, blocks = source % world_size, world_size * many
        query, key = (torch.arange(rank, blocks, world_size) for rank in (seed % world_size, source))
        on = draw_mask(seed, 1, 2, blocks, density=density)
        selected = draw_mask(seed + 1, 1, 2, len(key) * size, density=4 - density)
        columns = list_columns(selected, Slashes(on, query, key), size, int(selected.sum(-1).max()))
        visible = unpack_bits(columns.visible)
        for h in range(2):
            listed = columns.index[0, h, : columns.count[0, h]].tolist()
            assert listed == selected[0, h].nonzero()[:, 0].tolist()
            for i, block in enumerate(query.tolist()):
                seen = [at for slot, at in enumerate(listed) if visible[0, h, i, slot]]
                distances = [block - int(key[at // size]) for at in listed]
                wanted = [
                    at for at, d in zip(listed, distances, strict=True) if d > 0 and not bool(on[0, h, d])
                ]
                assert seen == wanted
                assert columns.limit[0, h, i] == sum(d > 0 for d in distances)

    fuzz(700, check, world_size=SMALL, many=SMALL, size=SMALL, source=SMALL, density=SMALL, seed=SEEDS)


def test_first_slots():
    """What a row's first key is among the columns of every head, whatever the keys and their number."""

    def check(batch, blocks, size, rows, density, seed):
        selected = draw_mask(seed, batch, 2, blocks * size, density=density)
        order = torch.arange(blocks)
        slashes = Slashes(draw_mask(seed, batch, 2, blocks, density=density), order, order)
        columns = list_columns(selected, slashes, size, int(selected.sum(-1).max()))
        first_key = torch.randint(0, blocks * size + 1, (batch, rows), generator=generator(seed)).int()
        tiles = Tiles(*list_by_query(slashes), True, size, columns, first_key=first_key.sort(-1).values)
        first_slot = with_first_slots(tiles).columns.first_slot
        for b in range(batch):
            for h in range(2):
                wanted = [int(selected[b, h, :first].sum()) for first in tiles.first_key[b].tolist()]
                assert first_slot[b, h].tolist() == wanted

    sizes = {"batch": st.integers(1, 2), "blocks": SMALL, "size": SMALL, "rows": SMALL}
    fuzz(500, check, **sizes, density=st.integers(0, 4), seed=SEEDS)


def test_selection():
    """Scores are multiples of 1 / 1024 with many ties: every sum is exact, so only the rule decides."""

    def check(rows, length, steps, share, cap, seed):
        drawn = torch.randint(0, steps, (rows, length), generator=generator(seed))
        kept = select(
            drawn.float() / 1024,
            torch.full((rows,), math.inf if share is None else share / 1024, dtype=torch.float64),
            torch.full((rows,), cap, dtype=torch.int32),
        )
        for row in range(rows):
            scores = [score / 1024 for score in drawn[row].tolist()]
            wanted = _select(scores, None if share is None else share / 1024, cap)
            assert set(kept[row].nonzero()[:, 0].tolist()) == wanted

    shares = st.one_of(st.none(), st.integers(0, 3000))
    steps, caps = st.integers(1, 64), st.integers(0, 60)
    fuzz(1500, check, rows=SMALL, length=st.integers(1, 50), steps=steps, share=shares, cap=caps, seed=SEEDS)


def test_merge_of_any_parts_in_any_order():
    """The parts of a softmax, some empty, some of enormous scores, join to the softmax of all keys."""

    def check(keys, parts, spread, order, seed):
        drawn = generator(seed)
        scores = torch.randn(3, keys, generator=drawn, dtype=torch.float64) * spread
        value = torch.randn(keys, 2, generator=drawn, dtype=torch.float64)
        owner = torch.randint(0, parts, (3, keys), generator=drawn)
        steps = []
        for part in range(parts):
            inside = scores.masked_fill(owner != part, -torch.inf)
            lse = torch.logsumexp(inside, -1)
            weight = torch.exp(inside - torch.where(lse == -torch.inf, 0.0, lse)[:, None])
            steps.append(((weight @ value)[:, None, None], lse[None, None]))
        order.shuffle(steps)
        out, lse = (tensor.clone() for tensor in steps[0])
        for step in steps[1:]:
            merge(out, lse, *step)
        expected = (torch.softmax(scores, -1) @ value)[:, None, None]
        assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
        assert torch.allclose(lse[0, 0], torch.logsumexp(scores, -1), rtol=1e-12)

    spreads = st.sampled_from([0.0, 1.0, 1e2, 1e4])
    fuzz(1000, check, keys=st.integers(1, 6), parts=SMALL, spread=spreads, order=st.randoms(), seed=SEEDS)
