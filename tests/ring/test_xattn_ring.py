"""xattn on every layout and ring shape equals naive attention under the naive antidiagonal mask."""

from functools import partial

import pytest
import torch

from tests.oracle import xattn_mask
from tests.ring.cases import Case, check
from tests.ring.gang import SHAPES


def run(gang, shape, *, implementation="stripe", case=Case, extra=None, names=None, sizes=None, **fields):
    """Checks one case with the given fields of the YAML."""
    settings = {"granularity": 16, "stride": 4, "threshold": 0.8, **fields}
    tokens = 192 if shape == [3] else 256
    naive = partial(xattn_mask, **settings, scale=(extra or {}).get("softmax_scale"))
    made = case(
        "xattn", {**settings, "implementation": implementation}, tokens, extra=extra or {}, **(sizes or {})
    )
    check(gang, shape, made, naive, *([names] if names else []))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("implementation", ["zigzag", "stripe", "dr_stripe"])
@pytest.mark.parametrize(("heads", "groups", "batch"), [(2, 2, 1), (4, 1, 2)], ids=["mha-b1", "gqa4-b2"])
def test_equals_naive(gang, shape, implementation, heads, groups, batch):
    run(gang, shape, implementation=implementation, sizes={"heads": heads, "groups": groups, "batch": batch})


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("stride", [4, 8, 16])
def test_thresholds_and_strides(gang, threshold, stride):
    run(gang, [4], threshold=threshold, stride=stride, implementation="zigzag", sizes={"heads": 2})


def test_settings_reach_the_choice(gang):
    run(gang, [2], norm=0.25, keep_recent=True, threshold=0.3)
    run(gang, [2], threshold=0.5, extra={"softmax_scale": 0.9})


class TiedCase(Case):
    """All keys alike: every past cell has the same probability."""

    def tensors(self, beside):
        query, key, value, grad_out = super().tensors(beside)
        return query, torch.ones_like(key), value, grad_out


def test_equal_scores(gang):
    # A threshold far from any multiple of a block's share: which block crosses it does not hang on rounding.
    run(gang, [4], case=TiedCase, threshold=0.6283, names=["out"], sizes={"heads": 2})
