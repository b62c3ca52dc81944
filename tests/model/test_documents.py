"""Packed documents train as if each were a sequence of its own: every token's loss, and all gradients.

Documents of 512 tokens, read through Megatron's GPTDataset: two in a sample of 1024, kept apart, or one in
each sample of 512. Both ways the first step sees the same four of the five documents.
"""

import functools

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_mtrain import make_layout
from tests.model.conftest import BLOCK, VOCABULARY
from tests.model.test_parallel import FULL, SELECTIVE, worst

DOCUMENT = 512
MASKING = "--dataloader-inter-document-masking"
RESTART = (MASKING, "--reset-position-ids")
CASES = {
    "exact": ("cp1", "stripe_ring", (MASKING,)),
    "sparse": ("cp1", "minfer", RESTART),
    "context": ("cp2", "minfer", (*RESTART, "--micro-batch-size", "2", *SELECTIVE)),
    "pipeline": ("cp2pp2", "minfer", (MASKING, *FULL)),
}


@pytest.fixture(scope="module")
def step(runs, tmp_path_factory):
    """A function that makes one step: ({a document's first tokens: the losses of its tokens}, gradients)."""
    data = write_documents(tmp_path_factory.mktemp("documents") / "text")

    @functools.cache
    def make(layout: str, attention: str, flags, num_tokens: int):
        logs = tmp_path_factory.mktemp("losses")
        shape = ["--seq-length", str(num_tokens), "--global-batch-size", str(4 * DOCUMENT // num_tokens)]
        flags = [*shape, "--data-path", str(data), "--tensorboard-dir", str(logs), *flags]
        gradients = runs.gradients(layout, attention, "note_losses", flags)
        return read_losses(logs, num_tokens), gradients

    return make


def write_documents(prefix):
    """An indexed dataset of five documents that repeat themselves after a while, each in its own way."""
    random = np.random.default_rng(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for period in (70, 83, 97, 110, 131):
        phrase = random.integers(0, VOCABULARY - 1, period)
        builder.add_document(torch.from_numpy(np.resize(phrase, DOCUMENT)), [DOCUMENT])
    builder.finalize(f"{prefix}.idx")
    return prefix


def read_losses(logs, num_tokens: int) -> dict:
    ranks = [torch.load(path) for path in sorted(logs.glob("losses*.pt"))]
    layout = make_layout("stripe", num_tokens, len(ranks), BLOCK)
    found = {}
    for parts in zip(*ranks, strict=True):
        tokens, losses = (layout.unshard(list(shards), 1) for shards in zip(*parts, strict=True))
        for text, values in zip(tokens.view(-1, DOCUMENT), losses.view(-1, DOCUMENT), strict=True):
            found[tuple(text[:8].tolist())] = values
    return found


@pytest.mark.parametrize("case", CASES)
def test_equals_separate_sequences(step, case):
    layout, attention, flags = CASES[case]
    expected_losses, expected_gradients = step("cp1", attention, (), DOCUMENT)
    losses, gradients = step(layout, attention, flags, 2 * DOCUMENT)
    # Where positions run on, float32 rounds angles of up to 1023 rad by up to 3e-5 rad.
    tolerance = 1e-5 if flags[:2] == RESTART else 1e-4
    assert len(losses) == 4
    assert losses.keys() == expected_losses.keys()
    for document, values in losses.items():
        torch.testing.assert_close(values, expected_losses[document], rtol=tolerance, atol=tolerance)
    assert max(worst(gradients, expected_gradients).values()) < 1e-4


def test_without_masking_documents_see_each_other(step):
    """Negative control."""
    expected, _ = step("cp1", "stripe_ring", (), DOCUMENT)
    losses, _ = step("cp1", "stripe_ring", (), 2 * DOCUMENT)
    assert max(float((losses[document] - expected[document]).abs().max()) for document in losses) > 0.1
