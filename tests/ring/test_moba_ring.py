"""moba on every layout and ring shape equals naive attention under the naive mixture-of-block mask."""

from functools import partial

import pytest
import torch

from tests.oracle import moba_mask
from tests.ring.cases import Case, check
from tests.ring.gang import SHAPES


def run(gang, shape, *, chunk_size=48, topk=3, implementation="stripe", case=Case, block_size=16, **sizes):
    """Checks one case; the last chunk is short where the chunk size does not divide the sequence."""
    fields = {"moba_chunk_size": chunk_size, "moba_topk": topk, "block_size": block_size}
    tokens = 192 if shape == [3] else 256
    naive = partial(moba_mask, chunk_size=chunk_size, topk=topk)
    check(gang, shape, case("moba", {**fields, "implementation": implementation}, tokens, **sizes), naive)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("implementation", ["zigzag", "stripe", "dr_stripe"])
@pytest.mark.parametrize(("heads", "groups", "batch"), [(2, 2, 1), (4, 1, 2)], ids=["mha-b1", "gqa4-b2"])
def test_equals_naive(gang, shape, implementation, heads, groups, batch):
    run(gang, shape, implementation=implementation, heads=heads, groups=groups, batch=batch)


@pytest.mark.parametrize(
    ("chunk_size", "topk"),
    [(16, 1), (16, 5), (64, 100), (256, 2), (1024, 3), (112, 2)],
    ids=["own-only", "chunk-is-block", "all-chunks", "one-chunk", "chunk-beyond-the-end", "short-last-chunk"],
)
@pytest.mark.parametrize("implementation", ["zigzag", "stripe"])
def test_chunk_edges(gang, chunk_size, topk, implementation):
    run(gang, [4], chunk_size=chunk_size, topk=topk, implementation=implementation, heads=2, groups=1)


class TiedCase(Case):
    """All keys alike: every gate of a row is the same."""

    def tensors(self, beside):
        query, key, value, grad_out = super().tensors(beside)
        return query, torch.ones_like(key), value, grad_out


def test_ties_go_to_the_lower_chunk(gang):
    fields = {"moba_chunk_size": 32, "moba_topk": 3, "block_size": 16}
    case = TiedCase("moba", fields, 256, heads=2, groups=1)
    check(gang, [4], case, partial(moba_mask, chunk_size=32, topk=3), names=["out"])
