"""Documents of packed sequences on one rank: what is refused, and what they are for the layers."""

import pytest
import torch

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention
from megatron_mtrain.documents import Documents

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
