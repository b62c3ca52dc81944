"""Telemetry: every tag of a run against the masks of that run, and the parts that need no run."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.training import training

from megatron_mtrain import AttentionConfig, core_attention, telemetry, totals
from megatron_mtrain.core_attention import SparseRingAttention
from megatron_mtrain.samples import BY_HEAD, Sample
from megatron_mtrain.telemetry import Telemetry, summary
from megatron_mtrain.totals import METRICS, Totals
from tests.model.conftest import FRESH, HEADS, LAYERS, TOKENS, read_events
from tests.model.test_glue import transformer

BY_LAYER = {*(f"layer_{layer:02d}" for layer in range(LAYERS)), "mean"}
STEPS = {f"ring/{way}/step_{step:02d}/{what}" for way in ("forward", "backward") for step in (0, 1)
         for what in ("wait_ms", "compute_ms", "wait_ms_max", "compute_ms_max")}  # fmt: skip


@pytest.fixture(scope="module")
def run(runs):
    """Scalars and tensors by tag, and the last rank's output, of a run that also notes its masks."""
    logs = runs.folder / "telemetry"
    flags = ["--lr", "1e-2", "--train-iters", "2", "--log-interval", "2", "--log-ring-timing"]
    start = ["--tensorboard-dir", str(logs), "--load", runs.initial, *FRESH]
    printed = runs.trainers.folder / "rank3.log"  # of all runs
    before = printed.stat().st_size if printed.exists() else 0
    runs.train("cp2pp2", "minfer", [*flags, *start], "note_masks")
    return read_events(logs), logs, printed.read_bytes()[before:].decode()


def test_density_is_that_of_the_masks(run):
    """Of two micro batches in the second step, on both pipeline stages."""
    (scalars, tensors), logs, _ = run
    noted = [json.loads(line) for file in logs.glob("masks*") for line in file.read_text().splitlines()]
    by_head = torch.zeros(LAYERS, HEADS, dtype=torch.float64)
    for layer, attended in noted:
        by_head[layer] += torch.tensor(attended) / (TOKENS * (TOKENS + 1) / 2)
    assert len(noted) == 2 * 2 * LAYERS  # context-parallel ranks, micro batches
    by_head /= 4
    torch.testing.assert_close(tensors["attention/by_head/density"], by_head.float())
    for layer in range(LAYERS):
        assert scalars[f"attention/density/layer_{layer:02d}"] == {2: pytest.approx(by_head[layer].mean())}
    assert scalars["attention/density/mean"][2] == pytest.approx(by_head.mean())


def test_every_tag_is_there(run):
    (scalars, tensors), _, _ = run
    names = ("density", "recall", "columns", "slashes", "index_ms")
    expected = {f"attention/{name}/{layer}" for name in names for layer in BY_LAYER} | STEPS
    expected |= {"ring/worker_imbalance", "ring/step_imbalance"}
    expected |= {"step/ms", "step/tokens_per_second", "step/tflops_per_gpu"}
    assert {tag for tag in scalars if "/" in tag} == expected
    assert all(list(values) == [2] for tag, values in scalars.items() if tag in expected)
    value = {tag: scalars[tag][2] for tag in expected}
    assert all(0 < value[f"attention/recall/{layer}"] < 1 for layer in BY_LAYER)
    assert all(8 <= value[f"attention/columns/{layer}"] <= 8 + 11 for layer in BY_LAYER)
    assert 1 <= value["ring/worker_imbalance"] <= value["ring/step_imbalance"] < 2
    assert value["step/tokens_per_second"] == pytest.approx(2 * TOKENS / value["step/ms"] * 1000)
    assert all(value[tag] <= value[f"{tag}_max"] for tag in STEPS if not tag.endswith("max"))
    recall = tensors["attention/by_head/recall"]
    assert recall.shape == (LAYERS, HEADS)
    assert recall.mean() == pytest.approx(value["attention/recall/mean"])


def test_summary_is_printed_once_per_interval(run):
    _, _, output = run
    (line,) = [line for line in output.splitlines() if line.startswith(" attention: ")]
    words = (
        "density",
        "recall",
        "columns",
        "slashes",
        "index",
        "imbalance",
        "tokens/s",
        "forward",
        "backward",
    )
    assert all(f" {word} " in line for word in words)


def test_summary_says_what_there_is():
    numbers = {"attention/density/mean": 0.0412, "ring/worker_imbalance": 1.018, "step/mfu": 0.4}
    assert summary(numbers) == " attention: density 4.1% imbalance 1.02 MFU 40.0%"
    step = "ring/forward/step_0"
    times = {
        f"{step}{at}/{what}_ms": ms for at, what, ms in [(0, "wait", 1), (1, "wait", 2), (0, "compute", 4)]
    }
    assert summary(times | {f"{step}1/compute_ms": 5}) == " attention: forward 9.0 ms + 3.0 ms waiting"


@pytest.fixture
def layer():
    """A layer that takes notes of every step."""
    config = AttentionConfig.from_dict("moba", {"moba_chunk_size": 32, "moba_topk": 2, "block_size": 16})
    module = SparseRingAttention(
        transformer(recompute_granularity="selective"), 1, attention=config, pg_collection=SimpleNamespace()
    )
    module.sampled = lambda: True
    return module.train()


@pytest.mark.parametrize("reuse", ["nothing", "index", "output"])
def test_recomputed_layers_count_once(layer, reuse):
    layer.attention = replace(layer.attention, reuse=reuse)
    query = torch.randn(64, 1, 4, 16, requires_grad=True)
    with torch.no_grad():
        layer(query, query, query)
    layer(query, query, query).sum().backward()
    assert len(layer.samples) == 1


def test_evaluation_and_other_steps_are_not_counted(layer, monkeypatch):
    monkeypatch.setattr(core_attention, "sample", None)  # would fail if it were called
    query = torch.randn(64, 1, 4, 16)
    layer.eval()(query, query, query)
    layer.sampled = lambda: False
    layer.train()(query, query, query)
    assert layer.samples == []


@pytest.mark.parametrize(("iteration", "logged"), [(0, False), (3, False), (4, True), (9, True)])
def test_only_logged_steps_are_sampled(layer, monkeypatch, iteration, logged):
    telemetry_on = Telemetry(SimpleNamespace(log_attention=True, log_ring_timing=True))
    telemetry_on._watch([torch.nn.ModuleList([layer])])
    args = SimpleNamespace(curr_iteration=iteration, log_interval=5)
    monkeypatch.setattr(telemetry, "get_args", lambda: args)
    assert layer.sampled() is layer.passes.timed() is logged


def test_off_means_nothing_is_installed():
    config, training_log = SimpleNamespace(pre_wrap_hooks=[]), training.training_log
    off = Telemetry(SimpleNamespace(log_attention=False, log_ring_timing=False))
    off.attach(config)
    with off.written():
        assert training.training_log is training_log
    assert config.pre_wrap_hooks == []


def test_rates_and_memory_of_a_gpu(monkeypatch):
    """A GPU whose peak is known has utilisation; half of the pairs cost half of attention."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(telemetry, "get_num_microbatches", lambda: 3)
    monkeypatch.setattr(telemetry, "from_arguments", lambda args, source: "shape")
    monkeypatch.setattr(telemetry, "linear_flops", lambda shape, tokens: 1e12 * tokens)
    monkeypatch.setattr(telemetry, "attention_flops", lambda shape, length, n, share: 8e12 * n * share)
    args = SimpleNamespace(micro_batch_size=1, data_parallel_size=2, seq_length=4, world_size=4)
    by_head = torch.full((len(METRICS), 2, 2), 0.5, dtype=torch.float64)
    numbers = telemetry.step_numbers(args, Totals(by_head, 1, 1, None, None, 7.0), seconds=2.0)
    assert numbers == {
        "step/ms": 2000,
        "step/tokens_per_second": 12,
        "step/peak_memory_gib": 7,
        "step/tflops_per_gpu": pytest.approx((24 + 24) / 8),
        "step/mfu": pytest.approx((24 + 24) / 8 / 989.5),
        "step/mfu_dense_equivalent": pytest.approx((24 + 48) / 8 / 989.5),
    }


def test_heads_of_tensor_parallel_ranks_keep_their_place(monkeypatch):
    """Two ranks of two heads each, one layer and two micro batches: what one of them fills in."""
    monkeypatch.setattr(
        totals, "dist", SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=totals.dist.ReduceOp)
    )
    samples = [
        Sample(
            torch.full((len(BY_HEAD), 2), value, dtype=torch.float64),
            torch.tensor([6.0]).double(),
            (0.0, 0.5),
        )
        for value in (0.2, 0.4)
    ]
    passes = SimpleNamespace(read=lambda direction: [])
    layer = SimpleNamespace(samples=samples, passes=passes, layer=1, tensor_rank=1, world_size=1, rings=[])
    found = totals.gather([layer], num_layers=2, num_heads=4, world_size=1, device="cpu")
    assert found.by_head[0, 1, 2:].tolist() == pytest.approx([0.3, 0.3])
    assert found.by_head[METRICS.index("index_ms"), 1, 2:].tolist() == [500, 500]
    assert found.by_head[:, 1, :2].isnan().all() and found.by_head[:, 0].isnan().all()
    assert (found.worker_imbalance, samples) == (1.0, [])


def test_wandb_gets_the_numbers(monkeypatch):
    logged = []
    on = Telemetry(SimpleNamespace(log_attention=False, log_ring_timing=True))
    found = Totals(None, 1.0, 1.0, torch.ones(2, 1, 2), torch.ones(2, 1, 2), 0.0)
    args = SimpleNamespace(num_layers=1, num_attention_heads=1, context_parallel_size=1)
    monkeypatch.setattr(telemetry, "get_args", lambda: args)
    monkeypatch.setattr(telemetry, "gather", lambda *_, **__: found)
    monkeypatch.setattr(telemetry, "print_rank_last", lambda line: None)
    monkeypatch.setattr(telemetry, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(
        telemetry, "get_wandb_writer", lambda: SimpleNamespace(log=lambda *a: logged.append(a))
    )
    on._write(7, 1.0)
    ((numbers, iteration),) = logged
    assert iteration == 7 and numbers["ring/forward/step_00/wait_ms_max"] == 1 and len(numbers) == 8
