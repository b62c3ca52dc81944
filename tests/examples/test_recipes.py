"""Every recipe is short, passes all checks of pretrain_qwen.py, and fits its GPUs."""

import functools
import json

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_mtrain import AttentionConfig, arguments, presets, qwen_shape
from tests.examples.recipes import EXAMPLES, LAUNCHERS, LENGTHS, ROOT, training
from tools.plan.memory import GIB, budgets, needed
from tools.plan.memory_parts import Run

SIZES = {"one_gpu.sh": "0.5b"}  # of the others: 3b
LONG = [(launcher, length) for launcher in LAUNCHERS for length in LENGTHS]
OTHERS = sorted(path.name for path in EXAMPLES.glob("qwen*.sh")) + ["demo_cpu.sh"]


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a data set, `text`, and the config.json of two models."""
    folder = tmp_path_factory.mktemp("place")
    builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=np.int32)
    builder.add_document(torch.randint(0, 255, (600,)), [600])
    builder.finalize(f"{folder}/text.idx")
    for size in ("0.5b", "3b"):
        (folder / size).mkdir()
        shape = presets.model_shape(f"qwen2.5-{size}")
        (folder / size / "config.json").write_text(json.dumps(qwen_shape.to_hf(shape)))
    return folder


@functools.cache
def start(recipe: str, place, size: str, **settings):
    """What a recipe starts for a model; the data is the tests', since no recipe brings its own."""
    data = ["--tokenizer-type", "NullTokenizer", "--data-path", str(place / "text")]
    folders = {"HF": place / size, "DATA": place / "text", "OUT": place / "run"}
    return training(recipe, place, data, **folders, **settings)


def dry_run(scripts, found) -> str:
    """The plan that pretrain_qwen.py prints."""
    null = [] if "--vocab-size" in found.flags or "--model" in found.flags else ["--vocab-size", "256"]
    (output,) = scripts.run("pretrain_qwen", [*found.flags, *null, "--dry-run", str(found.ranks)])
    return output[output.index("\nmodel ") :]


@pytest.mark.parametrize(("launcher", "length"), LONG)
def test_long_context(scripts, place, launcher, length):
    found = start(f"launch/{launcher}", place, SIZES.get(launcher, "3b"), LENGTH=length)
    gpus = 1 if launcher == "one_gpu.sh" else 8
    nodes, tokens = LAUNCHERS[launcher], LENGTHS[length]
    assert (found.option("--nproc-per-node"), found.option("--nnodes")) == (gpus, nodes)
    context = min(tokens // 32768, found.ranks)
    plan = dry_run(scripts, found)
    assert f"context {context} * data {found.ranks // context}\n" in plan
    assert f"{tokens} a sequence" in plan
    assert f"YaRN from 32768 to {tokens}" in plan
    levels = f"dr_stripe, rings of 8 x {context // 8}" if context > gpus else f"stripe, rings of {context}"
    assert f"minfer on {levels}\n" in plan


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_long_context_fits_80_gib(place, launcher, length):
    size = SIZES.get(launcher, "3b")
    found = start(f"launch/{launcher}", place, size, LENGTH=length)
    context = found.option("--context-parallel-size")
    name = found.flags[found.flags.index("--train-attn-config") + 1]
    run = Run(
        shape=presets.model_shape(f"qwen2.5-{size}"),
        seq_length=LENGTHS[length],
        cp=context,
        dp=found.ranks // context,
        recompute="full",
        attn_type="minfer",
        mlp_chunk_size=found.option("--mlp-chunk-size"),
        offload_layer_inputs="--offload-layer-inputs" in found.flags,
        **budgets(AttentionConfig.from_yaml("minfer", name)),
    )
    assert name == f"minfer_qwen2.5_{size}_0.90"
    assert needed(run) <= 80 * GIB


@pytest.mark.parametrize("recipe", OTHERS)
def test_other_recipes(scripts, place, recipe):
    found = start(recipe, place, "3b" if "3b" in recipe else "0.5b")
    plan = dry_run(scripts, found)
    assert f"ranks     {found.ranks} = " in plan
    assert f"{found.option('--seq-length')} a sequence" in plan


def test_a_dry_run_is_the_script_alone(place):
    found = start("launch/one_node.sh", place, "3b", LENGTH="512K", DRY_RUN="1")
    assert found.launch == []
    assert found.option("--dry-run") == 8


def test_a_dry_run_refuses_what_a_run_refuses(monkeypatch, place):
    found = start("launch/one_node.sh", place, "3b", LENGTH="128K")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("sys.argv", ["pretrain_qwen.py", *found.flags, "--dry-run", "3"])
    with pytest.raises(ValueError, match=r"3 processes cannot be tensor 1 .* start a multiple of 4"):
        arguments.parse_arguments()


def test_an_unknown_length_is_refused(place):
    with pytest.raises(AssertionError, match="LENGTH=2M is unknown; give 64K, 128K, 512K or 1M"):
        start("launch/one_node.sh", place, "3b", LENGTH="2M")


def test_recipes_are_short():
    recipes = [*EXAMPLES.glob("*.sh"), *(EXAMPLES / "launch").iterdir()]
    assert {path.name for path in (EXAMPLES / "launch").iterdir()} == set(LAUNCHERS)
    for path in recipes:
        assert len(path.read_text().splitlines()) < 40, path.relative_to(ROOT)
