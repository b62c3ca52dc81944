"""Packed documents on every layout and ring shape equal naive attention under the naive mask per document."""

from functools import partial

import pytest

from tests.oracle import dense_mask, moba_mask, xattn_mask
from tests.ring.cases import Case, check

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
