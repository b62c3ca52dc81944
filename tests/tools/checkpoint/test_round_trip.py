"""Hugging Face to Megatron and back: every bit, and everything beside the weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tools.checkpoint.ranks import convert_in_process, train
from tests.tools.checkpoint.tiny_models import MODELS, YARN, make_model, save
from tools.checkpoint import safetensors_folder
from tools.checkpoint.safetensors_folder import INDEX, Planned
from tools.loaded_model import RUN

BESIDE = ("tokenizer_config.json", "merges.txt", "generation_config.json")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_model(folder: Path, original: Path) -> None:
    ours, theirs = weights(folder), weights(original)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    for name in BESIDE:
        assert (folder / name).read_bytes() == (original / name).read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_bits_survive(converted, convert, tmp_path, name):
    hf, megatron, *_ = converted(name)
    assert (hf / INDEX).is_file()  # several files in, one out
    convert("to-hf", "--megatron", megatron, "--out", tmp_path / "back")
    assert_same_model(tmp_path / "back", hf)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((hf / "config.json").read_text())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_are_cast(converted, convert, tmp_path, dtype):
    hf, *_ = converted("qwen3 untied gqa4")
    convert("to-megatron", "--hf", hf, "--out", tmp_path / "megatron", "--dtype", dtype)
    convert("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for name, tensor in weights(tmp_path / "back").items():
        assert torch.equal(tensor, weights(hf)[name].to(kind)), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").dtype == kind


def test_bf16_model_survives(convert, tmp_path):
    hf = save(make_model("qwen2 tied gqa4", dtype=torch.bfloat16), tmp_path / "hf")
    convert("to-megatron", "--hf", hf, "--out", tmp_path / "megatron")
    convert("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    assert_same_model(tmp_path / "back", hf)


@pytest.mark.parametrize("name", ["qwen2 tied gqa4", "qwen3 tied gqa8"])
def test_bits_survive_a_run(ranks, converted, tmp_path, name):
    """A step of rate 0 on two tensor-parallel ranks; then the folder that the run names is enough."""
    hf, megatron, *_ = converted(name)
    files = ["--model", str(hf), "--load", str(megatron), "--save", str(tmp_path / "trained")]
    extended = ["--rope-scaling", "yarn:8:128", "--seq-length", "512", "--tensor-model-parallel-size", "2"]
    ranks.run(2, train, [*RUN, *files, *extended])
    back = ["to-hf", "--megatron", str(tmp_path / "trained"), "--out", str(tmp_path / "back"), "--verify"]
    ranks.run(1, convert_in_process, back)
    assert_same_model(tmp_path / "back", hf)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "back").config
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["factor"] == 8
    assert config.rope_parameters["original_max_position_embeddings"] == 128
    assert config.max_position_embeddings == 1024


def test_yarn_survives(converted, convert, tmp_path):
    hf, megatron, *_ = converted("qwen2 tied gqa4", rope=YARN)
    convert("to-hf", "--megatron", megatron, "--out", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == json.loads((hf / "config.json").read_text())


def test_arguments_alone_make_a_config(converted, convert, tmp_path):
    """Without a folder of the original model its config.json comes from the checkpoint's arguments."""
    hf, megatron, tokens, expected = converted("qwen3 untied gqa4")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "release").symlink_to(megatron / "release")
    (alone / "latest_checkpointed_iteration.txt").write_text("release")
    convert("to-hf", "--megatron", alone, "--out", tmp_path / "back")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected)


def test_verify(ranks, converted, tmp_path):
    """In another process: on a machine without a GPU, Megatron's start changes the one it is in."""
    hf, *_ = converted("qwen2 tied gqa4", rope=YARN)
    there = ["to-megatron", "--hf", hf, "--out", tmp_path / "megatron", "--verify"]
    back = ["to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back", "--verify"]
    for words in (there, back):
        (printed,) = ranks.run(1, convert_in_process, [str(word) for word in words])
        assert "of the largest apart" in printed


def test_several_files_are_written(tmp_path):
    tensors = {f"layer{i}": torch.randn(3, i + 1) for i in range(5)}
    planned = [Planned(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    safetensors_folder.write(tmp_path, planned, tensors.__getitem__, shard_bytes=100)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert len(set(index["weight_map"].values())) > 1
