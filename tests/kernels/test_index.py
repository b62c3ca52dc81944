"""The whole index of a method, built by the Triton kernels, equals the one built by torch."""

import json
from functools import partial

import pytest
import torch

from megatron_mtrain import AttentionConfig, make_layout
from megatron_mtrain.documents import Documents
from megatron_mtrain.index import build_index, minfer, minfer_documents, moba, xattn
from megatron_mtrain.kernels import antidiagonal, probe_scores, tile_lists
from megatron_mtrain.kernels.route import choose_chunks_on_triton, route_rows_on_triton
from megatron_mtrain.kernels.select import select_by_threshold
from tests.oracle import minfer_mask, moba_mask, xattn_mask

TOKENS, BLOCK = 256, 32
BUDGETS = [(None, 20, None, 4), (0.6, 40, 0.5, 12)]
PROBE = {"last_q": 24, "sink_tokens": 3, "local_window": 5}


# None: every sequence is one document.
BORDERS = [[0, 60, 64, 224, TOKENS], [0, 5, 200, 201, TOKENS]]
PACKED = pytest.mark.parametrize("borders", [None, BORDERS], ids=["whole", "packed"])


def tensors(batch):
    """query [N, b, 2, d] and key [N, b, 1, d], with a few keys that everybody looks at."""
    generator = torch.Generator().manual_seed(7)
    query, key = (torch.randn(TOKENS, batch, heads, 32, generator=generator) for heads in (2, 1))
    key[::37] *= 3
    return query, key


@pytest.fixture
def on_triton(monkeypatch):
    """Sends everything that an index needs through the Triton kernels, whatever the device."""
    for module in (probe_scores, antidiagonal):
        monkeypatch.setattr(module, "runs_on_triton", lambda *_: True)
    monkeypatch.setattr(tile_lists, "_column_bits", tile_lists.column_bits)
    monkeypatch.setattr(moba, "choose_chunks", choose_chunks_on_triton)
    monkeypatch.setattr(moba, "route_rows", route_rows_on_triton)
    for module in (minfer, minfer_documents, xattn):
        monkeypatch.setattr(module, "select", select_by_threshold)
        monkeypatch.setattr(module, "list_by_query", tile_lists.query_lists)
        monkeypatch.setattr(module, "list_by_key", tile_lists.key_lists)


def check(attn_type, fields, naive, borders):
    query, key = tensors(len(borders or [0]))
    documents = borders and Documents.of(borders, TOKENS, len(borders))
    config = AttentionConfig.from_dict(attn_type, {"block_size": BLOCK, **fields})
    layout = make_layout(config.layout, TOKENS, 1, BLOCK)
    index = build_index(config, query, key, layout, [], 0, documents=documents).complete([])
    assert torch.equal(index.dense_mask(), naive(query, key, documents=borders))
    tiles = index.tiles(0, by_key=True)
    step = tile_lists.list_by_key(tile_lists_mask(tiles), 1)
    assert torch.equal(tiles.key_count, step[0])


def tile_lists_mask(tiles):
    from megatron_mtrain.kernels.reference import block_mask

    return block_mask(tiles, TOKENS // BLOCK)


@PACKED
def test_minfer(on_triton, tmp_path, borders):
    entries = [["vertical_and_slash", 20, 4, 1], ["flex_vertical_and_slash", [0.6, 40], [0.5, 12], 1]]
    file = tmp_path / "pattern.json"
    file.write_text(json.dumps([{str(head): entry for head, entry in enumerate(entries)}]))
    naive = {"budgets": BUDGETS, "block_size": BLOCK, **PROBE}
    check("minfer", {"pattern_config_name": str(file), **PROBE}, partial(minfer_mask, **naive), borders)


@PACKED
def test_moba(on_triton, borders):
    naive = partial(moba_mask, chunk_size=64, topk=3)
    check("moba", {"moba_chunk_size": 64, "moba_topk": 3}, naive, borders)


@pytest.mark.parametrize(
    ("threshold", "borders"), [(0.5, None), (0.9, None), (0.5, BORDERS)], ids=["half", "most", "packed"]
)
def test_xattn(on_triton, threshold, borders):
    # Two tokens a cell: scores of blocks reach 16, far above 1.
    naive = {"granularity": BLOCK, "stride": 2, "threshold": threshold}
    check("xattn", {"stride": 2, "threshold": threshold}, partial(xattn_mask, **naive), borders)
