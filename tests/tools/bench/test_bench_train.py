"""The training benchmark: its counts by hand, its clock on made-up times, and one whole run of toy size."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_mtrain import AttentionConfig, core_attention, make_layout
from megatron_mtrain.flops import attention_flops, linear_flops, peak_tflops, utilisation
from megatron_mtrain.presets import model_shape
from megatron_mtrain.qwen_shape import QwenShape, to_hf
from tools.bench import bench_train, step_parts
from tools.bench.measured_run import Bench
from tools.bench.step_parts import PARTS, Recorder

TINY = QwenShape("qwen2", 2, 64, 192, 4, 2, 16, 512, True)


def test_linear_flops_by_hand():
    """Two layers of 64 x (64 + 2 * 32) + 64 x 64 + 3 * 64 x 192 weights, and 512 x 64 of the output layer."""
    assert linear_flops(TINY, 1) == 6 * (2 * (8192 + 4096 + 36864) + 32768)
    # All of the published 0.5B's parameters but norms and biases: its tied embedding is the output layer.
    weights = 494032768 - (2 * 24 + 1) * 896 - 24 * (14 + 2 * 2) * 64
    assert linear_flops(model_shape("qwen2.5-0.5b"), 1000) == 6 * 1000 * weights


def test_attention_flops_by_hand():
    """Four tokens have 10 causal pairs; each costs 12 operations in 16 elements of 4 heads of 2 layers."""
    assert attention_flops(TINY, 4, 1, 1.0) == 10 * 12 * 16 * 4 * 2
    assert attention_flops(TINY, 4, 3, 0.5) == 1.5 * attention_flops(TINY, 4, 1, 1.0)


def test_utilisation():
    assert peak_tflops("NVIDIA H200") == 989.5
    assert peak_tflops("another") is None
    assert utilisation(4e12, 0.5, 2, 8.0) == 0.5
    assert utilisation(1.0, 1.0, 1, None) is None


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, in seconds."""
    hand = SimpleNamespace(at=0.0)
    monkeypatch.setattr(step_parts, "now", lambda: hand.at)
    return hand


def played(clock, *marks: tuple[float, str, bool]) -> dict[str, float]:
    recorder = Recorder()
    recorder.on = True
    for at, name, begins in marks:
        clock.at = at
        recorder.mark(name, begins)
    return {name: ms for name, ms in recorder.milliseconds().items() if ms}


def test_nested_parts_count_for_themselves(clock):
    times = played(
        clock,
        *[(0.0, "other", True), (1.0, "attention", True), (2.0, "index", True), (4.0, "index", False)],
        *[(7.0, "attention", False), (8.0, "other", False)],
        *[(100.0, "other", True), (100.5, "other", False)],
    )
    assert times == {"other": 2500, "attention": 4000, "index": 2000}


def test_parts_may_end_in_another_order(clock):
    marks = [(0.0, "mlp", True), (1.0, "attention", True), (2.0, "mlp", False), (5.0, "attention", False)]
    assert played(clock, *marks) == {"mlp": 1000, "attention": 4000}


def test_marks_follow_forward_and_backward_and_change_no_gradient():
    recorder = Recorder()
    recorder.on = True
    weight = torch.randn(4, 4, requires_grad=True)
    hidden = torch.randn(3, 2, 4, requires_grad=True)

    def linear(hidden, *, other):
        recorder.mark("work", True)
        return (hidden @ weight + other).tanh(), None

    other = torch.randn(3, 2, 4, requires_grad=True)
    out, bias = recorder.marked("mlp", linear)(hidden, other=other)
    assert bias is None
    assert [mark[:2] for mark in recorder.marks] == [("mlp", True), ("work", True), ("mlp", False)]
    recorder.marks.clear()
    grads = torch.autograd.grad(out.square().sum(), [hidden, weight, other])
    assert [mark[:2] for mark in recorder.marks] == [("mlp", True), ("mlp", False)]
    expected = torch.autograd.grad(linear(hidden, other=other)[0].square().sum(), [hidden, weight, other])
    assert all(torch.equal(one, two) for one, two in zip(grads, expected, strict=True))


@pytest.mark.parametrize(
    ("attn_type", "settings"),
    [
        ("dense", {}),
        ("moba", {"moba_chunk_size": 64, "moba_topk": 2}),
        ("xattn", {"stride": 8, "threshold": 0.5}),
    ],
)
def test_counted_pairs_are_those_of_the_mask(attn_type, settings, monkeypatch):
    sizes = {"granularity": 32} if attn_type == "xattn" else {"block_size": 32}
    config = AttentionConfig.from_dict(attn_type, {**settings, **sizes})
    layout = make_layout(config.layout, 256, 1, 32)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(256, 2, heads, 16, generator=generator) for heads in (4, 2))
    bench = Bench(1)
    bench.install(monkeypatch.setattr)
    bench.pairs = [0.0, 0.0]
    index = core_attention.build_index(config, query, key, layout, [], 0)
    mask = index.complete([]).dense_mask()
    assert bench.pairs == [mask.sum(), 2 * 4 * 256 * 257 / 2]


def test_speedups_and_failed_rows():
    rows = [
        {"tokens": 10, "method": "minfer", "step_ms": 2.0},
        {"tokens": 10, "method": "dense", "step_ms": 6.0},
        {"tokens": 20, "method": "dense", "gpus": 1, "error": "out of memory"},
        {"tokens": 20, "method": "minfer", "step_ms": 5.0},
    ]
    bench_train.add_speedups(rows)
    assert [row.get("speedup") for row in rows] == [3.0, 1.0, None, None]
    text = bench_train.markdown(SimpleNamespace(model="tiny", gpus=1), rows)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert "| 20 | dense | out of memory |" in text
    assert len({line.count("|") for line in table}) == 1


def test_reason():
    assert bench_train.reason("a\ntorch.OutOfMemoryError: CUDA out of memory\nb") == "out of memory"
    assert bench_train.reason("a\nValueError: no such thing\nb") == "ValueError: no such thing"
    assert bench_train.reason("") == "no output"


def test_whole_run(tmp_path, monkeypatch, capsys):
    """One row from the command line: a model of toy size, in a process of its own, with the new flags."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf(TINY)))
    flags = (
        f"--model {tmp_path} --seq-length 512 --attn-type minfer --steps 1 --budget 16 0.5 --out {tmp_path}"
    )
    extra = "-- --mlp-chunk-size 128 --offload-layer-inputs"
    monkeypatch.setattr(sys, "argv", ["bench_train.py", *flags.split(), *extra.split()])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    bench_train.main()
    (report,) = tmp_path.glob("*-train.md")
    assert "| 512 | minfer |" in report.read_text()
    assert report.read_text().strip() in capsys.readouterr().out
    (row,) = json.loads(report.with_suffix(".json").read_text())
    assert "error" not in row, row
    assert 0.2 < row["density"] < 1
    assert row["losses"][0] == pytest.approx(torch.tensor(512.0).log().item(), rel=0.02)
    assert len(row["losses"]) == 5
    assert row["tokens_per_s"] == pytest.approx(512e3 / row["step_ms"])
    parts = {part: row[f"{part}_ms"] for part in PARTS}
    assert all(ms > 0 for ms in parts.values()), parts
    assert row["mfu"] is row["peak_gib"] is None
    assert row["predicted_gib"] > 0
