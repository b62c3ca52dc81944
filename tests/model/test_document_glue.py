"""The seams with Megatron for packed documents: rotary positions, batch, core attention and arguments."""

from argparse import Namespace

import pytest
import torch

from megatron_mtrain import make_layout, sparse_ring_attention
from megatron_mtrain.batch import FIELDS, DocumentParams, slice_batch
from megatron_mtrain.checks import check_documents
from megatron_mtrain.documents import Documents
from megatron_mtrain.rope import length_or_documents, rotary_forward
from tests.model import test_glue
from tests.model.test_glue import BLOCK, HEAD, TOKENS, Group, attention, plain_rope, yarn

on_cpu, layer = test_glue.on_cpu, test_glue.layer  # fixtures

BORDERS = [[0, 100, 352, TOKENS], [0, TOKENS]]


@pytest.mark.parametrize("rotary", [plain_rope, lambda: yarn(4.0, 32768)], ids=["rope", "yarn"])
def test_rotary_angles_begin_again_in_every_document(rotary):
    rotary, rank = rotary(), 1
    forward, length = rotary_forward(rotary, attention(), Group(rank, 4)), length_or_documents(lambda *_: 7)
    documents = Documents.of(BORDERS, TOKENS, 2)
    assert length(None, None, None, None, DocumentParams("sbhd", documents=documents)) == 7
    asked = length(None, None, None, None, DocumentParams("sbhd", documents=documents, restart=True))
    begun, running = forward(asked), forward(TOKENS)
    if isinstance(running, tuple):
        (begun, factor), (running, expected_factor) = begun, running
        assert factor == expected_factor
    assert begun.shape == (TOKENS // 4, 2, 1, HEAD)
    assert torch.equal(begun[:, 1], running[:, 0])
    table = rotary.get_emb(TOKENS)
    table = (table[0] if isinstance(table, tuple) else table)[:, 0, 0]
    for row, position in enumerate(make_layout("stripe", TOKENS, 4, BLOCK).positions(rank).tolist()):
        first = max(border for border in BORDERS[0] if border <= position)
        assert torch.equal(begun[row, 0, 0], table[position - first])


@pytest.mark.parametrize("restart", [False, True])
def test_batch_carries_the_documents(restart):
    whole = {name: torch.zeros(2, TOKENS, dtype=torch.int64) for name in FIELDS}
    filled = [[*row, *[TOKENS] * (4 - len(row))] for row in BORDERS]
    part = slice_batch({**whole, "cu_seqlens": torch.tensor(filled)}, attention(), 1, 4, restart=restart)
    params = part["packed_seq_params"]
    assert params.qkv_format == "sbhd"
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.restart) == (TOKENS, TOKENS, restart)
    assert params.documents.starts == ((0, 100, 352), (0,))
    running = make_layout("stripe", TOKENS, 4, BLOCK).positions(1).expand(2, -1)
    assert torch.equal(part["position_ids"], torch.zeros_like(running) if restart else running)
    with pytest.raises(
        ValueError, match="sequence 0 goes from 0 to 256; it must go from 0 to the 512 tokens"
    ):
        slice_batch({**whole, "cu_seqlens": torch.tensor([[0, 256]] * 2)}, attention(), 1, 4)


def test_core_attention_keeps_documents_apart(layer):
    query = torch.randn(64, 2, 4, HEAD)
    documents = Documents.of([[0, 40, 64], [0, 64]], 64, 2)
    out = layer(query, query, query, None, packed_seq_params=DocumentParams("sbhd", documents=documents))
    whole = layer(query, query, query, None)
    torch.testing.assert_close(out[:40], whole[:40])
    torch.testing.assert_close(out[:, 1], whole[:, 1])
    alone = sparse_ring_attention(
        query[:, :1], query[:, :1], query[:, :1], config=attention(), layout=make_layout("stripe", 64, 1, 32),
        rings=[], documents=[[0, 40, 64]],
    )  # fmt: skip
    torch.testing.assert_close(out[:, :1], alone.flatten(2))
    with pytest.raises(ValueError, match="those of 2 sequences of 64 tokens; the batch has 1"):
        layer(*[query[:, :1]] * 3, None, packed_seq_params=DocumentParams("sbhd", documents=documents))


def test_arguments_refuse_fused_rotation_of_several_sequences():
    args = Namespace(
        dataloader_inter_document_masking=True,
        reset_position_ids=True,
        iterations_to_skip=[],
        micro_batch_size=2,
        apply_rope_fusion=True,
    )
    with pytest.raises(ValueError, match="--micro-batch-size 2 .*; add --no-rope-fusion, or use"):
        check_documents(args)
    for allowed in ({"micro_batch_size": 1}, {"apply_rope_fusion": False}, {"reset_position_ids": False}):
        check_documents(Namespace(**{**vars(args), **allowed}))
