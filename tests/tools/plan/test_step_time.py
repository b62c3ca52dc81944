"""Predicted step times against hand-worked numbers; the search; the command."""

import sys
from dataclasses import replace

import pytest

from megatron_mtrain.qwen_shape import QwenShape
from tools.plan import step_time
from tools.plan.memory import GIB
from tools.plan.memory_parts import Run
from tools.plan.ring_time import H200
from tools.plan.step_cost import Plan, parts
from tools.plan.step_time import flags, layouts, reasons, search

# 2 layers, hidden 512, feed-forward 1024, 4 query heads and 2 key heads of 128, vocabulary 1000
SHAPE = QwenShape("qwen2", 2, 512, 1024, 4, 2, 128, 1000, True)
PLAN = Plan(Run(SHAPE, 8192), batch=4, machine=H200, rate=500e12)


def on(**sizes) -> Plan:
    return replace(PLAN, run=replace(PLAN.run, **sizes))


def test_one_gpu_by_hand():
    found = parts(PLAN)
    # Weights of a layer: 512 * (12 * 128 + 3 * 1024) = 2359296, twice, and 512000 of the output layer. 6
    # operations a weight and token, 4 sequences of 8192 tokens.
    assert found["matrix products"] == pytest.approx(4 * 8192 * 6 * (2 * 2359296 + 512000) / 500e12)
    # 4 heads * 8192 * 8193 / 2 pairs, 4 * 128 * 3.5 operations each, 2 layers, 4 sequences.
    assert found["attention"] == pytest.approx(4 * 2 * 4 * 8192 * 8193 / 2 * 1792 / 410e12)
    for name in (
        "waiting on the ring",
        "index",
        "tensor parallelism",
        "pipeline bubble",
        "gradient exchange",
    ):
        assert found[name] == 0, name


def test_recomputation_runs_the_forward_of_layers_again():
    plain, again = parts(PLAN), parts(on(recompute="full"))
    head = 4 * 8192 * 6 * 512000 / 500e12
    assert again["matrix products"] - head == pytest.approx(4 / 3 * (plain["matrix products"] - head))
    assert again["attention"] == pytest.approx(4.5 / 3.5 * plain["attention"])
    assert parts(on(recompute="full", attn_reuse="output"))["attention"] == plain["attention"]


def test_tensor_parallelism_by_hand():
    found = parts(on(tp=2, sequence_parallel=True))
    # 8 exchanges a layer of half of 8192 * 512 bf16, 2 layers, 4 sequences, 350e9 bytes a second.
    assert found["tensor parallelism"] == pytest.approx(4 * 2 * 8 * 8192 * 512 * 2 / 2 / 350e9)
    assert found["matrix products"] == pytest.approx(parts(PLAN)["matrix products"] / 2)


def test_pipeline_bubble_is_the_time_of_the_stages_before():
    found = parts(on(pp=2))
    step = sum(
        s for name, s in found.items() if name not in ("pipeline bubble", "gradient exchange", "optimizer")
    )
    assert found["pipeline bubble"] == pytest.approx(step / 4)


def test_data_parallelism_splits_the_batch_and_exchanges_gradients():
    found = parts(on(dp=4))
    assert found["matrix products"] == pytest.approx(parts(PLAN)["matrix products"] / 4)
    # 2 layers with 1024 biases of q, k, v and 2 * 512 of norms each, the tied embedding and the last norm.
    count = 2 * (2359296 + 1024 + 2 * 512) + 512000 + 512
    assert found["gradient exchange"] == pytest.approx(6 * count * 3 / 4 / 350e9)


def test_index_grows_with_the_method():
    minfer = on(attn_type="minfer", seq_length=65536)
    # 9.1 ms for 16 heads and 524288 tokens, so 1 / 32 of it for 4 heads and 65536; 2 layers, 4 sequences.
    assert parts(minfer)["index"] == pytest.approx(4 * 2 * 9.1e-3 / 32)
    assert parts(on(attn_type="xattn", seq_length=65536))["index"] == pytest.approx(4 * 2 * 23.2e-3 / 4 / 4)


@pytest.mark.parametrize(
    ("sizes", "ring"),
    [({"cp": 8}, (8,)), ({"cp": 16}, (8, 2)), ({"cp": 8, "tp": 2}, (4, 2)), ({"cp": 4, "tp": 2}, (4,)),
     ({"cp": 32, "tp": 4}, (2, 16))],
)  # fmt: skip
def test_rings_that_leave_a_node_have_two_levels(sizes, ring):
    assert on(**sizes).ring == ring
    assert on(**sizes, attn_type="stripe_ring").ring == (sizes["cp"],)


def test_layouts_use_all_gpus_and_keep_what_is_fixed():
    found = list(layouts(PLAN, {}, 8))
    assert found
    assert {plan.gpus for plan in found} == {8}
    assert {plan.run.dp for plan in found} == {1, 2, 4}  # the batch of 4 has no 8 ranks
    assert {plan.run.pp for plan in found} == {1, 2}  # two layers
    assert max(plan.run.tp for plan in found) == 4
    assert all(plan.run.cp == 2 for plan in layouts(PLAN, {"cp": 2}, 8))


def test_search_sorts_by_time_and_counts_what_does_not_fit():
    found, misfits = search(layouts(PLAN, {}, 8), 80 * GIB)
    seconds = [time for time, _ in found]
    assert misfits == 0
    assert seconds == sorted(seconds)
    assert seconds[0] == pytest.approx(sum(parts(found[0][1]).values()))
    everything = len(found)
    found, misfits = search(layouts(PLAN, {}, 8), GIB)  # less than the reserve
    assert (found, misfits) == ([], everything)


def test_words_of_a_plan():
    plan = on(tp=2, cp=8, recompute="full", sequence_parallel=True)
    assert "--hierarchical-context-parallel-sizes 4 2 --attn-implementation dr_stripe" in flags(plan)
    assert "--sequence-parallel" in flags(plan)
    assert "Against" not in reasons(PLAN, PLAN)
    assert "Against the first: " in reasons(plan, PLAN)


def run(monkeypatch, words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["step_time.py", *words.split()])
    step_time.main()


def test_the_command_prints_five_layouts(monkeypatch, capsys):
    run(monkeypatch, "--model qwen2.5-0.5b --seq-length 16384 --gpus 16 --global-batch 16 --attn-type moba")
    text = capsys.readouterr().out
    assert "16 GPUs" in text
    assert text.count("\n| ") == 6  # the head and five
    assert "matrix products" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model gpt-2 --seq-length 16384 --gpus 8 --global-batch 8", "--model gpt-2"),
        (
            "--model qwen2.5-72b --seq-length 16384 --gpus 1 --global-batch 8",
            "no layout of 1 GPUs fits: 2 need",
        ),
        ("--model qwen2.5-3b --seq-length 1000 --gpus 8 --global-batch 8", "1000"),
    ],
    ids=["model", "memory", "length"],
)
def test_what_cannot_be_planned_is_refused(monkeypatch, words, message):
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, words)
