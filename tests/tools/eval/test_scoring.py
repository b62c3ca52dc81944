"""Losses, most likely tokens, and the tables of them, from logits and outcomes made by hand."""

import json
from types import SimpleNamespace

import pytest
import torch

from tools.eval import scores as scores_module
from tools.eval.report import mean, write
from tools.eval.scores import loss_by_position, score_samples
from tools.eval.scoring import score
from tools.eval.tasks import Sample


class Alone:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def test_score_of_logits_by_hand():
    """The hidden states are the logits; entries 4 and 5 pad the vocabulary and do not count."""
    logits = torch.tensor(
        [[0.0, 3.0, 1.0, 0.0, 9.0, 0.0], [2.0, 2.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0, 0]]
    )
    labels = torch.tensor([[1, 1, 3]])
    layer = SimpleNamespace(tp_group=Alone(), sequence_parallel=False, weight=torch.eye(6))
    found = score(
        hidden_states=logits[:, None], output_layer=layer, output_weight=None, labels=labels, context=4
    )
    expected = torch.nn.functional.cross_entropy(logits[:, :4], labels[0], reduction="none")
    torch.testing.assert_close(found[0, 0], expected)
    # Of two equal logits the first is the most likely.
    assert found[1, 0].tolist() == [1, 0, 1]


@pytest.fixture
def one_rank(monkeypatch):
    """A loaded model whose every loss is the token's position, and right are even positions."""

    def fake(loaded, tokens, vocabulary):
        places = torch.arange(tokens.size(1) - 1, dtype=torch.float32).expand(tokens.size(0), -1)
        return torch.stack([places, (places % 2 == 0).float()])

    def alone(gathered, value, group):
        gathered[0] = value

    monkeypatch.setattr(scores_module, "score_tokens", fake)
    monkeypatch.setattr(scores_module.dist, "all_gather_object", alone)
    return SimpleNamespace(groups=SimpleNamespace(dp=Alone()))


def test_answers_are_counted(one_rank):
    tokens = torch.zeros(10, dtype=torch.int64)  # positions 0 .. 8 have a next token
    samples = [Sample(tokens, 1, "niah", 0.5), Sample(tokens, 2, "niah", 0.0), Sample(tokens, 4, "niah", 0.5)]
    found = score_samples(one_rank, samples, 16, batch_size=2)
    assert found == [
        {"depth": 0.0, "samples": 1, "accuracy": 0.0, "token_accuracy": 0.5, "loss": 7.5},
        {"depth": 0.5, "samples": 2, "accuracy": 0.5, "token_accuracy": 0.75, "loss": (8 + 6.5) / 2},
    ]
    assert mean(found, "accuracy") == pytest.approx(1 / 3)


def test_loss_by_position(one_rank):
    found = loss_by_position(one_rank, [torch.zeros(10, dtype=torch.int64)] * 3, 16, bins=2)
    assert found == [{"first": 0, "end": 5, "loss": 2.0}, {"first": 5, "end": 9, "loss": 6.5}]


def test_report(tmp_path):
    cell = {"samples": 4, "accuracy": 0.25, "token_accuracy": 0.5, "loss": 1.0, "density": 0.125}
    results = [
        {"task": "niah", "length": length, "depth": depth, **cell}
        for length in (64, 128)
        for depth in (0.0, 1.0)
    ]
    results.append({"task": "kv", "length": 64, "depth": None, **cell})
    loss = [{"length": 64, "density": 1.0, "first": 0, "end": 64, "loss": 2.5}]
    found = {"command": "python ...", "attn_type": "minfer", "iteration": 7, "results": results, "loss": loss}
    write(found, tmp_path / "results.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "results.json", "results.md", "results.niah.png"]  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text()) == found
    text = (tmp_path / "results.md").read_text()
    assert "| niah | 128 | 12.5% | 8 | 25.0% | 50.0% | 1.0000 |" in text
    assert "| 100% | 25.0% | 25.0% |" in text and "| 64 | 0 .. 63 | 2.5000 |" in text
