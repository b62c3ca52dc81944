"""minfer on every layout and ring shape equals naive attention under the naive vertical-slash mask."""

from functools import partial

import pytest
import torch

from tests.oracle import minfer_mask
from tests.ring.cases import Case, check, write_pattern
from tests.ring.gang import SHAPES

FLEX = ["flex_vertical_and_slash", [0.6, 40], [0.5, 12], 1]
CAPPED = ["flex_vertical_and_slash", [0.95, 9], [0.95, 3], 1]
FIXED = ["vertical_and_slash", 20, 4, 1]
PROBE = {"last_q": 16, "sink_tokens": 3, "local_window": 5}


def budget(entry):
    """An entry of a pattern file as the oracle's (share, cap, share, cap)."""
    name, vertical, slash, _ = entry
    return (None, vertical, None, slash) if name == "vertical_and_slash" else (*vertical, *slash)


def run(gang, tmp_path, shape, entries, *, block_size=16, probe=PROBE, layer=0, **sizes):
    """Checks one case whose heads have the given pattern entries."""
    implementation = sizes.pop("implementation", "stripe")
    other = ["vertical_and_slash", 1, 1, 1]
    layers = [[other] * len(entries)] * layer + [entries]
    path = write_pattern(tmp_path / "pattern.json", layers)
    fields = {
        "pattern_config_name": path,
        "implementation": implementation,
        "block_size": block_size,
        **probe,
    }
    tokens = 192 if shape == [3] else 256
    case = Case("minfer", fields, tokens, heads=len(entries), layer=layer, **sizes)
    budgets = [budget(entry) for entry in entries]
    check(
        gang, shape, case, lambda query, key: minfer_mask(query, key, budgets, block_size=block_size, **probe)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("implementation", ["zigzag", "stripe", "dr_stripe"])
@pytest.mark.parametrize(
    ("entries", "groups", "batch"),
    [([FLEX, FIXED], 2, 1), ([FLEX, FIXED, CAPPED, FLEX], 1, 2)],
    ids=["mha-b1", "gqa4-b2"],
)
def test_equals_naive(gang, tmp_path, shape, implementation, entries, groups, batch):
    run(gang, tmp_path, shape, entries, implementation=implementation, groups=groups, batch=batch)


@pytest.mark.parametrize("implementation", ["zigzag", "stripe"])
def test_layer_selects_its_pattern_row(gang, tmp_path, implementation):
    run(gang, tmp_path, [2], [FLEX, CAPPED], implementation=implementation, groups=1, layer=2)


@pytest.mark.parametrize(
    "probe",
    [
        {"last_q": 1, "sink_tokens": 0, "local_window": 0},
        {"last_q": 40, "sink_tokens": 70, "local_window": 33},
        {"last_q": 1000, "sink_tokens": 1, "local_window": 1000},
    ],
    ids=["least", "probe-over-ranks", "beyond-the-sequence"],
)
@pytest.mark.parametrize("implementation", ["zigzag", "stripe"])
def test_probe_settings(gang, tmp_path, implementation, probe):
    run(gang, tmp_path, [4], [CAPPED, FIXED], implementation=implementation, groups=1, probe=probe)


@pytest.mark.parametrize(
    "entry",
    [
        ["vertical_and_slash", 0, 0, 1],
        ["vertical_and_slash", 1000, 1000, 1],
        ["flex_vertical_and_slash", [1.0, 1000], [0.0, 1000], 1],
        ["flex_vertical_and_slash", [0.0, 5], [1.0, 2], 1],
    ],
    ids=["nothing", "everything", "all-columns", "two-slashes"],
)
def test_extreme_budgets(gang, tmp_path, entry):
    run(gang, tmp_path, [3], [entry, entry], groups=2)


@pytest.mark.parametrize("block_size", [8, 32])
def test_other_block_sizes(gang, tmp_path, block_size):
    run(gang, tmp_path, [4], [FLEX, FIXED], groups=1, block_size=block_size, implementation="zigzag")


def test_softmax_scale_reaches_probe_and_kernel(gang, tmp_path):
    path = write_pattern(tmp_path / "pattern.json", [[FLEX, FIXED]])
    fields = {"pattern_config_name": path, "block_size": 16, **PROBE}
    case = Case("minfer", fields, 256, heads=2, groups=1, extra={"softmax_scale": 0.7})
    budgets = [budget(FLEX), budget(FIXED)]
    check(gang, [2], case, lambda q, k: minfer_mask(q, k, budgets, block_size=16, scale=0.7, **PROBE))


def test_all_keys_equal_ties_go_to_the_lower_position(gang, tmp_path):
    path = write_pattern(tmp_path / "pattern.json", [[FIXED, FIXED]])
    fields = {"pattern_config_name": path, "block_size": 16, "implementation": "stripe", **PROBE}
    case = TiedCase("minfer", fields, 256, heads=2, groups=1)
    budgets = [budget(FIXED)] * 2
    naive = partial(minfer_mask, budgets=budgets, block_size=16, **PROBE)
    check(gang, [4], case, naive, names=["out"])  # every gradient of query and key is zero here


class TiedCase(Case):
    """Keys so unlike the queries that all probabilities beyond the first keys are exactly zero: ties by
    score."""

    def tensors(self, beside):
        query, key, value, grad_out = super().tensors(beside)
        query, key = torch.ones_like(query) * 20, -torch.ones_like(key) * 20
        key[40] = 20.0
        return query, key, value, grad_out
