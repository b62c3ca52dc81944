"""The memory estimate against a small Megatron model, against peaks measured on an H200, and by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_mtrain.presets import NAMES, model_shape
from megatron_mtrain.qwen_shape import QwenShape
from tests.tools.plan import measured_layer as small
from tools.plan import memory
from tools.plan.memory import advice, needed, peak, report, verdict
from tools.plan.memory_parts import (
    Run,
    attention_backward,
    host_bytes,
    index_bytes,
    layer_saves,
    parameters,
    resident,
    saved,
)

ROOT = Path(__file__).parents[3]
SHAPE = QwenShape(
    "qwen2",
    small.LAYERS,
    small.HIDDEN,
    small.FFN,
    small.HEADS,
    small.GROUPS,
    small.HEAD,
    small.VOCABULARY,
    True,
)
# Of the published checkpoints: elements of all tensors in their safetensors files.
PUBLISHED = {"qwen2.5-0.5b": 494032768, "qwen2.5-1.5b": 1543714304, "qwen2.5-3b": 3085938688,
             "qwen2.5-7b": 7615616512, "qwen3-0.6b": 596049920}  # fmt: skip


def tiny(**changed) -> Run:
    sizes = {"seq_length": small.TOKENS, "micro_batch": small.BATCH, "block_size": 64}
    return Run(SHAPE, transformer_engine=False, **sizes | changed)


def large(**changed) -> Run:
    defaults = {"seq_length": 524288, "cp": 8, "recompute": "full", "attn_type": "minfer"}
    return Run(model_shape("qwen2.5-3b"), **defaults | changed)


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    command = [sys.executable, "-m", "tests.tools.plan.measured_layer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_parameters_of_a_megatron_model(measured):
    assert parameters(tiny(), 0) == measured["parameters"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    assert parameters(Run(model_shape(name), 1024), 0) == PUBLISHED[name]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_ranks_hold_the_model_together(tp, pp):
    """All matrices are split; norms are on every tensor rank, the tied embedding on two stages."""
    shape = model_shape("qwen2.5-3b")
    whole = parameters(Run(shape, 1024), 0)
    split = tp * sum(parameters(Run(shape, 1024, tp=tp, pp=pp), stage) for stage in range(pp))
    norms = (tp - 1) * (2 * shape.num_layers + 1) * 2048
    assert split == whole + norms + (pp > 1) * shape.vocab_size * 2048


def test_what_a_layer_saves(measured):
    assert sum(layer_saves(tiny()).values()) == measured["layer"]
    assert sum(layer_saves(tiny(mlp_chunk_size=small.CHUNK)).values()) == measured["chunked"]


# Tokens and peak MiB of minfer in tools/bench/results/2026-12-01-layer.csv.
@pytest.mark.parametrize(("tokens", "mib"), [(131072, 3606.0), (524288, 14475.7)])
def test_attention_peak_measured_on_a_gpu(tokens, mib):
    """bench_layer holds query, key, value, the output and its gradient, as the backward of a layer does."""
    run = Run(model_shape("qwen2.5-3b"), tokens, attn_type="minfer", columns=1088)
    names = ("query, key, value", "attention out and lse")
    total = sum(layer_saves(run)[name] for name in names) + sum(attention_backward(run).values())
    assert (total + index_bytes(run)[0]) / 2**20 == pytest.approx(mib, rel=0.005)


def test_by_hand():
    """Qwen2.5-3B, 524288 tokens on 8 ranks: 65536 tokens of hidden size 2048 in bf16 are 256 MiB."""
    run = large()
    assert run.hidden_bytes == 256 * 2**20
    assert saved(run, 0)["layer inputs"] == 36 * 256 * 2**20
    assert saved(large(offload_layer_inputs=True), 0)["layer inputs"] == 3 * 256 * 2**20
    assert host_bytes(large(offload_layer_inputs=True)) == 36 * 256 * 2**20
    assert saved(large(attn_reuse="output"), 0)["kept attention out and lse"] == 36 * (256 + 4) * 2**20
    assert resident(run, 0)["master weights, Adam (fp32)"] == 12 * 3085938688 // 8
    assert resident(large(distributed_optimizer=False), 0)["master weights, Adam (fp32)"] == 12 * 3085938688
    # 16 heads, 512 x 512 blocks of 4 bytes in two directions, of which the ring holds one step at a time
    assert index_bytes(large(attn_type="dense"))[1] == 2 * 16 * 2**20
    # moba's lists hold the tiles of a query's own chunk alone: 32 blocks
    assert index_bytes(large(attn_type="moba"))[1] == 2 * 2**20
    # 2 key heads of 128 elements, keys and values, bf16: 64 MiB a shard
    assert attention_backward(run)["visiting keys and values"] == 2 * 64 * 2**20
    assert attention_backward(large(ring_comm="allgather"))["visiting keys and values"] == 8 * 64 * 2**20
    assert layer_saves(run)["MLP"] == 3 * 11008 * 65536 * 2
    assert layer_saves(large(mlp_chunk_size=8192))["MLP"] == 0


def test_megatrons_own_loss_is_the_widest_moment():
    """128K tokens, one GPU: 151936 * 131072 float32 logits are 74 GiB, and not alone."""
    run = large(seq_length=131072, cp=1, loss_chunk_size=0)
    name, parts = peak(run)
    assert name == "loss"
    assert parts["logits of all tokens"] == 10 * 151936 * 131072
    assert peak(replace(run, loss_chunk_size=2048))[0] != "loss"


@pytest.mark.parametrize(
    "changed",
    [
        {"mlp_chunk_size": 8192},
        {"offload_layer_inputs": True},
        {"cp": 16},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"dp": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("attn_type", ["dense", "minfer", "moba", "xattn"])
def test_what_saves_memory_does(changed, attn_type):
    before = (
        large(attn_type=attn_type, tp=2) if "sequence_parallel" in changed else large(attn_type=attn_type)
    )
    assert needed(replace(before, **changed)) < needed(before)


def test_pipeline_reports_its_widest_stage():
    first = large(pp=4, offload_layer_inputs=True)
    assert "stage 0" in peak(large(pp=4, recompute="none"))[0]
    assert "stage 3" in peak(replace(first, loss_chunk_size=0))[0]


def test_advice_makes_it_fit():
    run, limit = large(recompute="none", loss_chunk_size=0), 80 * 2**30
    steps = advice(run, limit)
    assert steps[0] == "--loss-chunk-size 2048"
    assert "full" in steps[1]
    assert verdict(run, limit).startswith("Does not fit") and steps[1] in verdict(run, limit)
    assert verdict(large(), limit).startswith("Fits")
    assert advice(run, 2**30) == []
    assert "more GPUs" in verdict(run, 2**30)


def test_report_sums_up():
    rows = [line.split(" | ") for line in report(large()).splitlines() if line.startswith("| ")]
    sizes = {row[0][2:]: float(row[1].strip("* |")) for row in rows[1:]}
    total, reserve = sizes.pop("**peak**"), sizes.pop("with reserve")
    assert sum(sizes.values()) == pytest.approx(total, abs=0.1)
    assert reserve > total


@pytest.mark.parametrize("name", NAMES)
def test_command(name, monkeypatch, capsys):
    flags = f"--model {name} --seq-length 131072 --cp 8 --recompute full --gpu-memory 10000"
    monkeypatch.setattr(sys, "argv", ["memory.py", *flags.split()])
    with pytest.raises(SystemExit) as ended:
        memory.main()
    assert ended.value.code == 0
    assert "Fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model nope --seq-length 1024", "nope"),
        ("--model qwen2.5-3b --seq-length 500000 --cp 8", "nearest 499712 or 500736"),
        ("--model qwen2.5-3b --seq-length 1024 --tp 3", "16 query heads"),
        ("--model qwen2.5-3b --seq-length 1024 --pp 5", "36 layers"),
        ("--model qwen2.5-3b --seq-length 1024 --offload-layer-inputs", "--recompute full"),
    ],
)
def test_wrong_input_is_one_line(flags, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["memory.py", *flags.split()])
    with pytest.raises(SystemExit, match=message):
        memory.main()


def test_budgets_of_a_configuration_file(monkeypatch):
    flags = "--model qwen2.5-3b --seq-length 524288 --attn-type moba --train-attn-config moba_4096_12"
    monkeypatch.setattr(sys, "argv", ["memory.py", *flags.split()])
    assert memory.run_of(memory.arguments()).moba == (4096, 12)
    flags = "--model qwen2.5-3b --seq-length 524288 --attn-type minfer --train-attn-config"
    monkeypatch.setattr(sys, "argv", ["memory.py", *flags.split(), "minfer_qwen2.5_3b_0.90"])
    assert memory.run_of(memory.arguments()).columns == 4096 + 30
