"""Pictures of a run's events: what they draw, and what they say when there is nothing to draw."""

import numpy
import pytest
import torch

from megatron_mtrain import telemetry
from megatron_mtrain.samples import BY_HEAD
from megatron_mtrain.totals import METRICS, Totals
from tools.plot import heads, layers, loss, report, ring_measured, speed
from tools.plot.figures import NoData
from tools.plot.runs import read_run


def test_tags_are_those_that_telemetry_writes():
    totals = Totals(torch.ones(len(METRICS), 2, 4), 1.0, 1.0, torch.ones(2, 3, 2), torch.ones(2, 3, 2), 1.0)
    written = telemetry.attention_numbers(totals) | telemetry.ring_numbers(totals)
    assert set(layers.QUANTITIES) == set(BY_HEAD)
    assert {f"attention/{name}/layer_01" for name in layers.QUANTITIES} <= written.keys()
    assert {f"ring/backward/step_02/{name}" for name in ring_measured.TIMES} <= written.keys()
    read = {tag for tag in (*speed.QUANTITIES, *report.MEANS) if not tag.startswith("step/")}
    assert read <= written.keys()


def test_smoothing_is_centred():
    values = numpy.array([0.0, 1.0, 2.0, 3.0, 10.0])
    assert loss.smoothed(values, 3).tolist() == [0, 1, 2, 5, 10]
    line = numpy.arange(50.0)
    assert numpy.allclose(loss.smoothed(line, 7), line)
    assert loss.smoothed(values[:1], 5).tolist() == [0]
    values[2] = numpy.nan
    assert numpy.allclose(loss.smoothed(values, 3), [0, 0.5, numpy.nan, 6.5, 10], equal_nan=True)


def test_loss_by_steps_and_tokens(full_run, is_picture):
    run = read_run(full_run)
    steps, tokens = loss.curve(run, "a", window=2), loss.curve(run, "a", unit="tokens")
    assert steps.x.tolist() == [*range(10, 101, 10)]
    assert tokens.x.tolist() == [2 * 4096 * step for step in range(10, 101, 10)]
    assert steps.raw == pytest.approx([5 - step / 50 for step in range(10, 101, 10)])
    assert steps.last == pytest.approx((3.2 + 3.0) / 2)
    assert [values.tolist() for values in steps.validation] == [[50, 100], pytest.approx([4.2, 3.1])]
    is_picture(loss.figure([steps, loss.curve(run, "b")]))
    is_picture(loss.draw([full_run], unit="tokens"))


def test_loss_that_cannot_be_drawn(tmp_path, write_run, call):
    run = write_run(tmp_path / "a", {"lm loss": {1: 2.0}, "lm loss vs samples": {1: 2.0}})
    with pytest.raises(NoData, match="does not say its sequence length"):
        loss.draw([run], unit="tokens")
    out = tmp_path / "x.png"
    assert "--window 0 must be at least 1" in call(loss, run, "--window", 0, "--out", out)
    assert "has no 'lm loss'" in call(loss, write_run(tmp_path / "b", {"x": {1: 1.0}}), "--out", out)
    assert "must end in .png" in call(loss, run, "--out", tmp_path / "x.pdf")
    assert "does not exist; make it first" in call(loss, run, "--out", tmp_path / "no" / "x.png")
    assert not list(tmp_path.glob("*x.p*"))
    assert call(loss, run, "--out", out) is None
    assert out.read_bytes().startswith(b"\x89PNG")


def test_layers_line_up_with_their_steps(tmp_path, write_run, is_picture):
    tags = {"layer_00": {10: 0.1, 20: 0.2}, "layer_02": {20: 0.4, 30: 0.5}}
    run = read_run(write_run(tmp_path / "a", {f"attention/density/{tag}": v for tag, v in tags.items()}))
    data = layers.by_layer(run, "density")
    assert data.layers == [0, 2]
    assert data.steps.tolist() == [10, 20, 30]
    assert numpy.allclose(data.values, [[0.1, 0.2, numpy.nan], [numpy.nan, 0.4, 0.5]], equal_nan=True)
    is_picture(layers.figure([data]))
    with pytest.raises(NoData, match="no attention/recall/layer_NN; train without --no-log-attention"):
        layers.by_layer(run, "recall")
    with pytest.raises(NoData, match="only minfer"):
        layers.by_layer(run, "columns")


def test_many_steps_are_averaged():
    values = numpy.arange(20.0).reshape(2, 10)
    values[0, 0] = numpy.nan
    data = layers.Layers("columns", [0, 1], numpy.arange(10, 110, 10), values)
    edges, cells = layers.thinned(data, most=5)
    assert edges.tolist() == [5, 25, 45, 65, 85, 105]
    assert cells.tolist() == [[1, 2.5, 4.5, 6.5, 8.5], [10.5, 12.5, 14.5, 16.5, 18.5]]


def test_all_quantities_of_layers(full_run, is_picture):
    is_picture(layers.draw(read_run(full_run), list(layers.QUANTITIES)))


def test_heads_of_a_run_are_the_last(full_run, is_picture):
    table = heads.of_run(read_run(full_run))
    assert "step 100" in table.title
    assert list(table.values) == ["recall", "density"]
    assert table.values["recall"] == pytest.approx(numpy.linspace(0.5, 0.95, 12).reshape(3, 4))
    is_picture(heads.figure(table))


def test_heads_of_exact_attention_have_no_recall(tmp_path, write_run, is_picture):
    tensors = {"density": torch.ones(2, 4), "recall": torch.full((2, 4), torch.nan)}
    tensors = {f"attention/by_head/{name}": {5: value} for name, value in tensors.items()}
    table = heads.of_run(read_run(write_run(tmp_path / "a", {"x": {1: 1.0}}, tensors)))
    assert list(table.values) == ["density"]
    is_picture(heads.figure(table))


def test_ring_steps(full_run, is_picture, tmp_path, write_run):
    forward, backward = ring_measured.measured(read_run(full_run))
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.numbers == [0, 1, 2, 3]
    assert forward.wait.tolist() == [0, 0.25, 0.5, 0.75]
    assert backward.compute.tolist() == [3] * 4
    assert backward.slowest_compute.tolist() == [6] * 4
    is_picture(ring_measured.figure([forward, backward]))
    with pytest.raises(NoData, match="train with --log-ring-timing"):
        ring_measured.measured(read_run(write_run(tmp_path / "a", {"x": {1: 1.0}})))


def test_speed_has_a_panel_for_what_any_run_logged(full_run, tmp_path, write_run, is_picture):
    other = write_run(tmp_path / "a", {"step/ms": {1: 1.0}})
    found = speed.panels([read_run(full_run), read_run(other)])
    assert list(found) == list(speed.QUANTITIES)
    assert [series is None for series in found["step/ms"]] == [False, False]
    assert [series is None for series in found["step/mfu"]] == [False, True]
    is_picture(speed.draw([full_run, other]))
    with pytest.raises(NoData, match="logged no step/tokens_per_second"):
        speed.panels([read_run(write_run(tmp_path / "b", {"x": {1: 1.0}}))])
