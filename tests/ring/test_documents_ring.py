"""Packed documents on every layout and ring shape equal naive attention under the naive mask per document."""

from functools import partial

import pytest

from tests.oracle import dense_mask, minfer_mask, moba_mask, xattn_mask
from tests.ring.cases import Case, check, write_pattern

N, BLOCK = 256, 16
# Borders of the documents of two batch entries; blocks of 16 tokens, chunks of 48, cells of 4.
BORDERS = {
    "inside-blocks": [[0, 5, 77, 140, 141, 250, N], [0, 100, 103, N]],
    "on-borders": [[0, 48, 96, 192, N], [0, N]],
    "many-tiny": [[*range(0, N, 3), N], [0, *range(130, 250, 7), N]],
    "one-long": [[0, 230, N], [0, 26, 27, N]],
}
RINGS = [("stripe", [1]), ("stripe", [4]), ("zigzag", [2]), ("zigzag", [4]), ("dr_stripe", [2, 2])]
PARTS = pytest.mark.parametrize(("implementation", "shape"), RINGS, ids=str)


def run(gang, shape, attn_type, fields, borders, naive, **sizes):
    """Checks one batch of two packed sequences."""
    documents = {"documents": BORDERS[borders]}
    case = Case(attn_type, fields, N, batch=2, extra=documents, **{"heads": 2, "groups": 1, **sizes})
    check(gang, shape, case, partial(naive, **documents))


@PARTS
@pytest.mark.parametrize("borders", BORDERS)
def test_dense(gang, implementation, shape, borders):
    fields = {"implementation": implementation, "block_size": BLOCK}
    naive = lambda query, key, documents: dense_mask(2, 2, N, documents)  # noqa: E731
    run(gang, shape, "dense", fields, borders, naive)


@PARTS
@pytest.mark.parametrize("borders", BORDERS)
def test_moba(gang, implementation, shape, borders):
    fields = {"moba_chunk_size": 48, "moba_topk": 3}
    naive = partial(moba_mask, chunk_size=48, topk=3)
    fields |= {"implementation": implementation, "block_size": BLOCK}
    run(gang, shape, "moba", fields, borders, naive)


@PARTS
@pytest.mark.parametrize("borders", BORDERS)
def test_xattn(gang, implementation, shape, borders):
    fields = {"granularity": BLOCK, "stride": 4, "threshold": 0.5, "keep_recent": borders == "one-long"}
    naive = partial(xattn_mask, **fields)
    run(gang, shape, "xattn", {"implementation": implementation, **fields}, borders, naive)


ENTRIES = [["flex_vertical_and_slash", [0.6, 40], [0.5, 12], 1], ["vertical_and_slash", 12, 3, 1]]
BUDGETS = [(0.6, 40, 0.5, 12), (None, 12, None, 3)]
PROBES = {
    "documents": {"last_q": 16, "sink_tokens": 3, "local_window": 5},
    "every-document": {"last_q": 1000, "sink_tokens": 0, "local_window": 0},
    "nobody": {"last_q": 16, "sink_tokens": 3, "local_window": 250},
}


def run_minfer(gang, tmp_path, shape, implementation, borders, probe, **sizes):
    """Checks minfer with a flex and a fixed head."""
    path = write_pattern(tmp_path / "pattern.json", [ENTRIES])
    fields = {"pattern_config_name": path, "implementation": implementation, "block_size": BLOCK, **probe}
    naive = partial(minfer_mask, budgets=BUDGETS, block_size=BLOCK, **probe)
    run(gang, shape, "minfer", fields, borders, naive, **sizes)


@PARTS
@pytest.mark.parametrize("borders", BORDERS)
def test_minfer(gang, tmp_path, implementation, shape, borders):
    run_minfer(gang, tmp_path, shape, implementation, borders, PROBES["documents"])


@pytest.mark.parametrize("probe", ["every-document", "nobody"])
@pytest.mark.parametrize("borders", ["inside-blocks", "many-tiny"])
def test_minfer_probes(gang, tmp_path, borders, probe):
    run_minfer(gang, tmp_path, [2], "zigzag", borders, PROBES[probe], groups=2)
