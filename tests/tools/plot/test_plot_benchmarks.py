"""Pictures of benchmark files and of modelled rings."""

import json
from dataclasses import replace

import pytest

from tools.plan.work import Budget
from tools.plot import ring_timeline, throughput
from tools.plot.figures import NoData
from tools.plot.ring_timeline import Ring, of_run, passes
from tools.plot.runs import read_run

ROWS = [
    {"tokens": 131072, "method": "minfer", "tokens_per_s": 9e3, "speedup": 3.0, "density": 0.04},
    {"tokens": 65536, "method": "minfer", "tokens_per_s": 12e3, "speedup": 2.0, "density": 0.05},
    {"tokens": 65536, "method": "dense", "tokens_per_s": 6e3, "speedup": 1.0, "density": 1.0},
    {"tokens": 131072, "method": "dense", "gpus": 1, "error": "out of memory"},
]


@pytest.fixture
def steps(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(ROWS))
    return path


@pytest.fixture
def layer(tmp_path):
    path = tmp_path / "layer.csv"
    lines = ["65536,dense (cudnn),1.0,50.0,1.0", "65536,minfer,0.05,10.0,5.0"]
    path.write_text("\n".join(["tokens,method,density,total_ms,speedup", *lines]) + "\n")
    return path


def test_rows_of_steps(steps, is_picture):
    data = throughput.read([steps])
    lines = {method: [(p.tokens, p.speedup) for p in points] for method, points in data.lines().items()}
    assert lines == {"dense": [(65536, 1.0)], "minfer": [(65536, 2.0), (131072, 3.0)]}
    assert list(lines) == ["dense", "minfer"]
    assert data.failed == [("dense", 131072, "out of memory")]
    is_picture(throughput.figure(data))


def test_rows_of_a_layer(layer, is_picture):
    data = throughput.read([layer])
    assert [(p.kind, p.tokens_per_second) for p in data.points] == [
        ("layer", pytest.approx(1310720)),
        ("layer", pytest.approx(6553600)),
    ]
    is_picture(throughput.figure(data))


def test_without_a_dense_row_there_is_one_panel(steps, is_picture):
    steps.write_text(json.dumps([{"tokens": 1000, "method": "minfer", "tokens_per_s": 1.0}]))
    figure = throughput.figure(throughput.read([steps]))
    assert len(figure.axes) == 1
    is_picture(figure)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not readable"),
        ('{"a": 1}', "is no list of rows"),
        ('[{"tokens": 5}]', "row 1 is none of bench_train or bench_layer"),
        ('[{"tokens": 5, "method": "dense", "error": "no"}]', "no measured row"),
    ],
)
def test_files_that_are_no_benchmarks(tmp_path, text, message, call):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert message in call(throughput, path, "--out", tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_two_kinds_do_not_mix(steps, layer):
    with pytest.raises(ValueError, match="draw two"):
        throughput.read([steps, layer])


def test_lengths_in_words():
    assert [throughput.short(n) for n in (131072, 1048576, 5000, 512)] == ["128K", "1M", "5000", "512"]


SMALL = Ring(tokens=8192, world=4, budget=Budget(columns=64, slash_share=0.2))


@pytest.mark.parametrize("order", ["zigzag", "stripe"])
def test_modelled_ring_adds_up(order):
    made, density = passes(replace(SMALL, order=order))
    assert 0 < density < 1
    for each in made:
        ends = [max(span.end for span in each.spans if span.rank == rank) for rank in range(4)]
        assert max(ends) == pytest.approx(each.times.total)
        work = [sum(s.end - s.begin for s in each.spans if s.rank == rank and s.source is not None)
                for rank in range(4)]  # fmt: skip
        assert max(work) == pytest.approx(each.times.busiest)
        assert each.times.total - sum(work) / 4 == pytest.approx(each.times.waited)


def test_draws_a_modelled_ring(tmp_path, call, is_picture):
    is_picture(ring_timeline.draw(replace(SMALL, order="dr_stripe")))
    out = tmp_path / "ring.png"
    assert call(ring_timeline, "--tokens", 8192, "--world", 2, "--columns", 64, "--out", out) is None
    assert out.read_bytes().startswith(b"\x89PNG")
    refused = call(ring_timeline, "--tokens", 5000, "--world", 3, "--out", tmp_path / "x.png")
    assert "sequence length 5000 is not a multiple" in refused
    assert "give 2 to 64" in call(ring_timeline, "--world", 1, "--out", tmp_path / "x.png")


def test_ring_of_a_run(full_run):
    ring = of_run(read_run(full_run))
    assert (ring.attn_type, ring.tokens, ring.world, ring.order) == ("minfer", 4096, 4, "stripe")
    assert (ring.heads.query, ring.heads.key, ring.heads.size) == (4, 2, 64)
    assert (ring.budget.columns, ring.budget.slash_share) == (500, 8 * 128 / 4096)


def test_runs_without_a_ring(tmp_path, write_run):
    sizes = {"attn_type": "dense", "context_parallel_size": 1, "tensor_model_parallel_size": 1}
    sizes |= {"seq_length": 4096, "num_attention_heads": 4, "kv_channels": 64}
    with pytest.raises(NoData, match="there is no ring"):
        of_run(read_run(write_run(tmp_path / "one", {"x": {1: 1.0}}, arguments=sizes)))
    with pytest.raises(NoData, match="cannot be modelled: sequence length 1000"):
        changed = sizes | {"seq_length": 1000, "context_parallel_size": 2}
        of_run(read_run(write_run(tmp_path / "odd", {"x": {1: 1.0}}, arguments=changed)))
    with pytest.raises(NoData, match="does not say its context_parallel_size"):
        of_run(read_run(write_run(tmp_path / "bare", {"x": {1: 1.0}})))
