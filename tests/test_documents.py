"""Documents of packed sequences on one rank: what is refused, what the layers share, and that each is a
sequence of its own.
"""

import pytest
import torch

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention
from megatron_mtrain.documents import Documents
from tests.oracle import relative_error
from tests.ring.cases import write_pattern

N, BLOCK = 64, 8
LAYOUT = make_layout("stripe", N, 1, BLOCK)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([[0, N]], "cu_seqlens has 1 rows, the batch 2 sequences"),
        ([[0, N], [3, N]], "sequence 1 goes from 3 to 64; it must go from 0 to the 64 tokens"),
        ([[0, 32], [0, N]], "sequence 0 goes from 0 to 32"),
        ([[0, 40, 30, N], [0, N]], "sequence 0 descends from 40 to 30"),
        ([[0, 40, 80, N], [0, N]], "sequence 0 descends from 80 to 64"),
        ([[0, 1.5, N], [0, N]], "sequence 0 has shape .3. and dtype float64; it must be a row of integers"),
        (torch.zeros(2, 1, dtype=torch.int32), "sequence 0 has shape .1."),
        (torch.tensor([0, N]), "sequence 0 has shape .. "),
        (
            Documents.of([[0, N]], N, 1),
            "the documents are those of 1 sequences of 64 tokens; the batch has 2",
        ),
    ],
)
def test_refuses_borders_that_do_not_fit(cu_seqlens, message):
    query = torch.randn(N, 2, 2, 8)
    config = AttentionConfig.from_dict("dense", {"block_size": BLOCK})
    with pytest.raises(ValueError, match=message):
        sparse_ring_attention(
            query, query, query, config=config, layout=LAYOUT, rings=[], documents=cu_seqlens
        )


def test_borders_come_in_any_form():
    """As tensors filled up with the end, as Megatron's data sets have them, and as lists."""
    padded = torch.full((2, N + 1), N, dtype=torch.int32)
    padded[:, 0], padded[0, 1:3] = 0, torch.tensor([5, 40])
    for given in (padded, [[0, 5, 40, N], [0, N]], [[0, 5, 5, 40, N, N], torch.tensor([0, N])]):
        documents = Documents.of(given, N, 2)
        assert documents.starts == ((0, 5, 40), (0,))
        assert documents.several
        assert documents.longest == N
    assert Documents.of([[0, 5, 40, N]], N, 1).longest == 35
    assert not Documents.of([[0, N]], N, 1).several


def test_device_tensors_are_made_once():
    documents = Documents.of([[0, 5, 40, N], [0, 8, N]], N, 2)
    layout = make_layout("zigzag", N, 2, BLOCK)
    made = documents.first_key(layout, 1, 0, "cpu")
    assert documents.first_key(layout, 1, 0, "cpu") is made
    # Rank 1 has tokens 16 .. 47, rank 0 tokens 0 .. 15 and 48 .. 63: eleven of them in the second document.
    assert made[0].tolist() == [5] * 24 + [16] * 8
    assert made[1].tolist() == [8] * 32
    assert documents.first_block(layout, 0, "cpu").tolist() == [[0, 0, 5, 5], [0, 1, 1, 1]]


ENTRIES = [["vertical_and_slash", 9, 3, 1], ["flex_vertical_and_slash", [0.6, 12], [0.5, 6], 1]]
METHODS = {
    "dense": {"block_size": BLOCK},
    "minfer": {"block_size": BLOCK, "last_q": 12, "sink_tokens": 2, "local_window": 3},
    "moba": {"block_size": BLOCK, "moba_chunk_size": 16, "moba_topk": 2},
    "xattn": {"granularity": BLOCK, "stride": 4, "threshold": 0.6},
}


@pytest.mark.parametrize("attn_type", METHODS)
def test_documents_on_borders_equal_separate_sequences(attn_type, tmp_path):
    """Documents that begin at multiples of block, chunk and cell: index, out, dq, dk and dv, in float64."""
    fields = METHODS[attn_type]
    if attn_type == "minfer":
        fields = {**fields, "pattern_config_name": write_pattern(tmp_path / "pattern.json", [ENTRIES])}
    config = AttentionConfig.from_dict(attn_type, fields)
    generator = torch.Generator().manual_seed(2)
    borders = [0, 80, 96, 224, 240]
    tensors = [
        torch.randn(240, 2, heads, 8, dtype=torch.float64, generator=generator) for heads in (2, 1, 1, 2)
    ]
    tensors[1][::37] *= 3

    def attend(tensors, documents=None):
        *leaves, grad_out = (tensor.clone() for tensor in tensors)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        layout = make_layout("stripe", len(grad_out), 1, BLOCK)
        settings = {"config": config, "layout": layout, "rings": [], "documents": documents}
        out, index = sparse_ring_attention(*leaves, **settings, return_index=True)
        return index.dense_mask(), out.detach(), *torch.autograd.grad(out, leaves, grad_out)

    mask, *packed = attend(tensors, [borders, [0, 240]])
    whole, *expected = attend([tensor[:, 1:] for tensor in tensors])
    assert torch.equal(mask[1], whole[0])
    assert max(relative_error(a[:, 1:], e) for a, e in zip(packed, expected, strict=True)) < 1e-13
    for first, end in zip(borders[:-1], borders[1:], strict=True):
        alone, *expected = attend([tensor[first:end, :1] for tensor in tensors])
        assert torch.equal(mask[0, :, first:end, first:end], alone[0])
        parts = [tensor[first:end, :1] for tensor in packed]
        assert max(relative_error(a, e) for a, e in zip(parts, expected, strict=True)) < 1e-13
    of_token = torch.bucketize(torch.arange(240), torch.tensor(borders), right=True)
    assert not mask[0][:, of_token[:, None] != of_token].any()


def test_one_document_takes_the_way_without_documents():
    """Bitwise the same result, by the same tiles."""
    query = torch.randn(N, 1, 2, 8)
    settings = {"config": AttentionConfig.from_dict("dense", METHODS["dense"]), "layout": LAYOUT, "rings": []}
    given = {"documents": [[0, N]], "return_index": True}
    out, index = sparse_ring_attention(query, query, query, **settings, **given)
    assert index.documents is None
    assert index.tiles(0).rectangle is not None
    assert torch.equal(out, sparse_ring_attention(query, query, query, **settings))
