"""The ProLong recipes: every command line is one that the programs take, and one recipe runs at tiny size."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.arguments import parse_args
from transformers import AutoModelForCausalLM

from megatron_mtrain import arguments, checks, presets, qwen_shape
from tests.tools.checkpoint.tiny_models import make_model, save
from tools.checkpoint import convert_qwen

ROOT = Path(__file__).parents[3]
RECIPES = sorted(ROOT.glob("examples/qwen2.5_*_prolong_512k_*.sh"))


@pytest.fixture
def data(tmp_path) -> Path:
    builder = IndexedDatasetBuilder(f"{tmp_path}/text.bin", dtype=np.int32)
    for _ in range(4):
        builder.add_document(torch.randint(0, 255, (600,)), [600])
    builder.finalize(f"{tmp_path}/text.idx")
    return tmp_path / "text"


def write_model(name: str, folder: Path) -> Path:
    """A config.json of a preset."""
    shape = presets.model_shape(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(qwen_shape.to_hf(shape)))
    return folder


def run_recipe(recipe: Path, flags=(), **settings) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in settings.items()}
    command = ["bash", recipe, *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def commands(recipe: Path, tmp_path: Path, **settings) -> list[list[str]]:
    """The command lines of a recipe, run with a Python that writes them down and makes what --out names."""
    log = tmp_path / "commands"
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'printf "%q " "$@" >> {log}; echo >> {log}\n'
        'while [ $# -gt 0 ]; do [ "$1" != --out ] || mkdir -p "$2"; shift; done\n'
    )
    python.chmod(0o755)
    run_recipe(recipe, PYTHON=python, OUT=tmp_path / "run", **settings)
    return [shlex.split(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_programs_take_the_command_lines(monkeypatch, tmp_path, data, recipe):
    assert len(recipe.read_text().splitlines()) < 40
    size = recipe.stem.split("_")[1]
    hf = write_model(f"qwen2.5-{size}", tmp_path / "hf")
    there, train, back = commands(recipe, tmp_path, HF=hf, DATA=data)
    for words in (there, back):
        assert Path(words[0]).samefile(convert_qwen.__file__)
        convert_qwen.parse_arguments(words[1:])
    script = next(i for i, word in enumerate(train) if word.endswith("pretrain_qwen.py"))
    ranks = 32 if size == "3b" else 8
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(sys, "argv", train[script:])
    args = parse_args(arguments.add_arguments)
    attention = checks.validate(args)
    assert args.context_parallel_size == ranks
    assert (args.seq_length, args.global_batch_size, args.lr) == (524_288, 64, 2e-5)
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.clip_grad) == (0.9, 0.95, 0, 1)
    assert (args.rotary_scaling_factor, args.yarn_original_max_position_embeddings) == (16, 32768)
    assert (args.bf16, args.recompute_granularity) == (True, "full")
    layout = {"dense": ("zigzag_ring", "zigzag", False), "minfer": ("minfer", "stripe", True)}
    assert (attention.attn_type, attention.layout, attention.two_level) == layout[recipe.stem.split("_")[-1]]


def test_four_recipes():
    assert len(RECIPES) == 4


def test_recipe_at_tiny_size(tmp_path, data):
    """Two ranks of one node, from a Hugging Face folder to a Hugging Face folder."""
    hf = save(make_model("qwen2 untied gqa1", dtype=torch.bfloat16), tmp_path / "hf")
    flags = ["--tokenizer-type", "NullTokenizer", "--seq-length", "512", "--global-batch-size", "1"]
    settings = {"GPUS": 2, "NODES": 1, "STEPS": 1, "PYTHON": sys.executable}
    recipe = ROOT / "examples/qwen2.5_3b_prolong_512k_dense.sh"
    run_recipe(recipe, [*flags, "--num-workers", "0"], HF=hf, DATA=data, OUT=tmp_path / "run", **settings)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert made.config.rope_parameters["factor"] == 16
    assert made.config.max_position_embeddings == 16 * 1024
    assert (tmp_path / "run" / "trained" / "latest_checkpointed_iteration.txt").read_text() == "1"
    before = AutoModelForCausalLM.from_pretrained(hf).state_dict()
    assert all(made.state_dict()[name].shape == tensor.shape for name, tensor in before.items())
    moved = [name for name, tensor in before.items() if not torch.equal(made.state_dict()[name], tensor)]
    assert "model.layers.0.self_attn.q_proj.weight" in moved
