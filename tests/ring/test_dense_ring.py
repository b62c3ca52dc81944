"""Exact attention on every layout and ring shape equals naive attention."""

import pytest

from tests.oracle import dense_mask
from tests.ring.cases import Case, check
from tests.ring.gang import SHAPES

TYPES = {
    "dense-zigzag": ("dense", {"implementation": "zigzag"}),
    "dense-stripe": ("dense", {"implementation": "stripe"}),
    "dense-dr_stripe": ("dense", {"implementation": "dr_stripe"}),
    "zigzag_ring": ("zigzag_ring", {}),
    "stripe_ring": ("stripe_ring", {}),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("heads", "groups", "batch"), [(2, 2, 1), (4, 1, 2)], ids=["mha-b1", "gqa4-b2"])
def test_equals_naive(gang, shape, kind, heads, groups, batch):
    attn_type, fields = TYPES[kind]
    case = Case(attn_type, {"block_size": 16, **fields}, 192 if shape == [3] else 256, batch, heads, groups)
    check(gang, shape, case, lambda query, key: dense_mask(batch, heads, case.num_tokens))
