"""Every combination that cannot work is refused with one message, before anything is built."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.arguments import parse_args

from megatron_mtrain import arguments, checks

ROOT = Path(__file__).parents[2]
MODEL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"]
RUN = [*MODEL, "--seq-length", "1024", "--lr", "1e-3", "--train-iters", "1"]
DATA = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "256"]
PATTERN = {"pattern_config_name": "Qwen2.5_3B_flex_0.90"}


@pytest.fixture
def validate(monkeypatch):
    """Parses flags as pretrain_qwen.py does, for `world_size` processes, and checks them."""

    def parse_and_validate(flags, world_size=1, data=DATA):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setattr(sys, "argv", ["pretrain_qwen.py", *RUN, *data, *flags])
        return checks.validate(parse_args(arguments.add_arguments))

    return parse_and_validate


# id: (flags, processes, words of the message)
REFUSED = {
    "unknown type": ("--attn-type nope", 1, ["'nope'", "minfer"]),
    "unknown implementation": ("--attn-implementation spiral", 1, ["'spiral'", "dr_stripe"]),
    "unknown kernels": ("--attn-kernels abacus", 1, ["'abacus'", "triton"]),
    "implementation of another type": (
        "--attn-type zigzag_ring --attn-implementation stripe",
        1,
        ["'stripe'", "zigzag_ring"],
    ),
    "minfer without a pattern": ("--attn-type minfer", 1, ["pattern_config_name"]),
    "missing YAML file": (
        "--attn-type minfer --train-attn-config nowhere.yaml",
        1,
        ["nowhere.yaml", "shipped"],
    ),
    "sequence not divisible": (
        "--context-parallel-size 2 --seq-length 1000 --attn-type stripe_ring",
        2,
        ["1000", "256", "1024"],
    ),
    "sequence not divisible, zigzag": (
        "--context-parallel-size 4 --seq-length 1536 --attn-type zigzag_ring",
        4,
        ["1536", "1024", "2048"],
    ),
    "sequence missing": ("--seq-length", 1, ["--seq-length"]),
    "no learning rate": ("--lr", 1, ["--lr"]),
    "warm-up to the end": ("--lr-warmup-iters 1", 1, ["--lr-warmup-iters 1", "the 1 iters"]),
    "groups of heads": ("--num-query-groups 3", 1, ["4", "--num-query-groups 3"]),
    "heads of ranks": ("--tensor-model-parallel-size 3", 3, ["4", "--tensor-model-parallel-size 3"]),
    "processes": ("--context-parallel-size 2", 3, ["3 processes", "multiple of 2"]),
    "two levels without sizes": (
        "--context-parallel-size 4 --attn-implementation dr_stripe",
        4,
        ["--hierarchical-context-parallel-sizes", "= 4"],
    ),
    "two levels with three sizes": (
        "--context-parallel-size 8 --attn-implementation dr_stripe"
        " --hierarchical-context-parallel-sizes 2 2 2",
        8,
        ["[2, 2, 2]", "INNER"],
    ),
    "two levels with a wrong product": (
        "--context-parallel-size 4 --attn-implementation dr_stripe --hierarchical-context-parallel-sizes 2 4",
        4,
        ["2 4", "product 8", "4"],
    ),
    "attention dropout": ("--attention-dropout 0.1", 1, ["--attention-dropout 0.1", "set 0"]),
    "multi-token prediction": ("--mtp-num-layers 1", 1, ["--mtp-num-layers 1", "zigzag"]),
    "packed by SFT": ("--sft", 1, ["--sft", "THD"]),
    "reset attention mask": ("--reset-attention-mask", 1, ["--dataloader-inter-document-masking"]),
    "reset position ids": ("--reset-position-ids", 1, ["add --dataloader-inter-document-masking"]),
    "documents and skipped steps": (
        "--dataloader-inter-document-masking --iterations-to-skip 3 4",
        1,
        ["--iterations-to-skip 3 4", "leave one out"],
    ),
    "hybrid context parallel": ("--hybrid-context-parallel", 1, ["--hybrid-context-parallel"]),
    "CUDA graphs": ("--cuda-graph-impl local", 1, ["CUDA graphs"]),
    "CUDA graphs, old flag": ("--enable-cuda-graph", 1, ["CUDA graphs"]),
    "sliding window": ("--window-size 128,0", 1, ["--window-size"]),
    "latent attention": ("--multi-latent-attention", 1, ["--multi-latent-attention"]),
    "softmax with an offset": ("--softmax-type learnable", 1, ["--softmax-type learnable"]),
    "another layer spec": ("--spec megatron_mtrain.model layer_spec", 1, ["--spec", "--attn-type"]),
    "local attention backend": ("--attention-backend local", 1, ["--attention-backend"]),
    "positions of images": ("--position-embedding-type mrope", 1, ["mrope", "yarn"]),
    "YaRN that extends nothing": ("--position-embedding-type yarn", 1, ["--rotary-scaling-factor", "32768"]),
    "hybrid layers": ("--hybrid-layer-pattern M*M*", 1, ["--hybrid-layer-pattern"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(validate, case, monkeypatch):
    flags, world_size, words = REFUSED[case]
    if flags in ("--seq-length", "--lr"):
        monkeypatch.setattr(sys.modules[__name__], "RUN", without(RUN, flags))
        flags = ""
    with pytest.raises(ValueError) as error:
        validate(flags.split(), world_size)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def without(flags, name):
    """`flags` without `name` and its value."""
    place = flags.index(name)
    return flags[:place] + flags[place + 2 :]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (PATTERN | {"last_query": 64}, ["'last_query'", "last_q"]),
        (PATTERN | {"implementation": "round"}, ["'round'", "dr_stripe"]),
        ({"pattern_config_name": "Qwen9"}, ["'Qwen9'", "Qwen2.5_3B_flex_0.90"]),
        ({"pattern_config_name": "/nowhere/pattern.json"}, ["/nowhere/pattern.json"]),
        ({"pattern_config_name": "small.json"}, ["1 layers", "4"]),
        ({"pattern_config_name": "narrow.json"}, ["2 heads", "4"]),
    ],
    ids=["unknown field", "unknown value", "unknown pattern", "missing pattern", "few layers", "few heads"],
)
def test_refused_settings(validate, tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    head = ["vertical_and_slash", 8, 8, 1.0]
    Path("small.json").write_text(json.dumps([{str(h): head for h in range(4)}]))
    Path("narrow.json").write_text(json.dumps([{str(h): head for h in range(2)}] * 4))
    Path("config.yaml").write_text("".join(f"{name}: {value}\n" for name, value in content.items()))
    with pytest.raises(ValueError) as error:
        validate(["--attn-type", "minfer", "--train-attn-config", "config.yaml"])
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("flags", ["--data-path nowhere/text", "--train-data-path 1 nowhere/text", ""])
def test_missing_dataset(validate, flags):
    with pytest.raises(ValueError, match="nowhere/text.bin|no data set is named"):
        validate(flags.split(), data=DATA[1:])


def test_half_a_dataset(validate, tmp_path):
    (tmp_path / "text.bin").touch()
    with pytest.raises(ValueError, match="text.idx does not exist"):
        validate(["--data-path", str(tmp_path / "text")], data=DATA[1:])


@pytest.mark.parametrize(
    ("given", "tokenizer", "words"),
    [(None, 200, "token 250"), (251, 256, "smaller than the tokenizer's 256"), (250, 250, "token 250")],
)
def test_small_vocabulary(monkeypatch, tmp_path, given, tokenizer, words):
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([1, 250, 2]), [3])
    builder.finalize(str(tmp_path / "text.idx"))
    monkeypatch.setattr(checks, "get_tokenizer", lambda: SimpleNamespace(vocab_size=tokenizer))
    monkeypatch.setattr(checks, "dataset_prefixes", lambda args: [str(tmp_path / "text")])
    with pytest.raises(ValueError, match=words):
        checks.check_vocabulary(SimpleNamespace(vocab_size=given, mock_data=False))
    checks.check_vocabulary(SimpleNamespace(vocab_size=256, mock_data=False))


def test_accepted(validate):
    """What the refusals are not: every implementation at one rank, and two levels where they fit."""
    for implementation in ("zigzag", "stripe", "dr_stripe"):
        assert validate(["--attn-implementation", implementation]).implementation == implementation
    flags = (
        "--attn-implementation dr_stripe --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
    )
    assert validate([*flags.split(), "--attn-kernels", "reference"], 4).two_level


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--mtp-num-layers 1", "--mtp-num-layers 1"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /nowhere", "/nowhere"),
    ],
    ids=["refused here", "refused by Megatron"],
)
def test_command_line(flags, word):
    command = [sys.executable, "pretrain_qwen.py", *RUN, *DATA, *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("pretrain_qwen.py: error: ")]
    assert len(messages) == 1
    assert word in messages[0]


def test_launched_ranks_print_once():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    flags = [
        *RUN,
        *DATA,
        "--context-parallel-size",
        "2",
        "--attn-type",
        "minfer",
        "--train-attn-config",
        "nowhere",
    ]
    done = subprocess.run(
        [*launch, "pretrain_qwen.py", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("pretrain_qwen.py: error: ") == 1
