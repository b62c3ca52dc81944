"""What cannot be converted: one message that names value, rule and way out, and nothing left behind."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.checkpoint.tiny_models import make_model, save
from tools.checkpoint import convert_qwen
from tools.checkpoint.output_folder import new_folder

TOOL = Path(convert_qwen.__file__)


@pytest.fixture
def source(converted, tmp_path) -> Path:
    """A folder of a model in several files, to spoil."""
    return shutil.copytree(converted("qwen2 tied gqa4")[0], tmp_path / "in" / "hf")


@pytest.fixture
def trained(converted, tmp_path) -> Path:
    """A Megatron checkpoint, to spoil."""
    return shutil.copytree(converted("qwen2 tied gqa4")[1], tmp_path / "in" / "megatron")


@pytest.fixture
def refuse(tmp_path, monkeypatch):
    """Runs the tool, which has to refuse; returns its message."""
    place = tmp_path / "out"
    place.mkdir()

    def run(*words, out: Path | None = None) -> str:
        words = [str(word) for word in (*words, "--out", out or place / "made")]
        monkeypatch.setattr(sys, "argv", [str(TOOL), *words])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(SystemExit) as stopped:
            convert_qwen.main()
        assert isinstance(stopped.value.code, str)  # printed to stderr; the exit code is 1
        assert stopped.value.code.startswith("convert_qwen: ")
        assert "\n" not in stopped.value.code
        if out is None:
            assert list(place.iterdir()) == []
        return stopped.value.code

    return run


def edit(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]


CONFIGS = {
    "architecture": ({"model_type": "llama"}, ["'llama'", "another architecture", "Qwen3"]),
    "rope type": ({"rope_scaling": {"rope_type": "longrope"}}, ["'longrope'", "default and yarn"]),
    "old rope type": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["'linear'", "default and yarn"]),
    "vocabulary": ({"vocab_size": 500}, ["embed_tokens", "[503, 128]", "vocab_size 500", "another model"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act gelu", "silu"]),
    "window": (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2, "layer_types": None},
        ["use_sliding_window True", "has to be False"],
    ),
    "heads": ({"num_attention_heads": 4, "head_dim": 32}, ["k_proj", "4 heads and 2 key heads of 32"]),
    "uneven heads": ({"num_key_value_heads": 3}, ["8 attention heads", "multiple of 3"]),
    "layers": ({"num_hidden_layers": 5, "layer_types": None}, ["lacks model.layers.4", "download it again"]),
    "fewer layers": ({"num_hidden_layers": 3, "layer_types": None}, ["has model.layers.3", "12 tensors"]),
    "untied": ({"tie_word_embeddings": False}, ["lacks lm_head.weight"]),
    "family": ({"model_type": "qwen3", "head_dim": 16}, ["k_norm.weight", "qwen3"]),
    "fraction": ({"rope_theta": 10000.5, "rope_parameters": None}, ["10000.5", "whole number"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_that_does_not_fit(source, refuse, case):
    fields, words = CONFIGS[case]
    edit(source, **fields)
    message = refuse("to-megatron", "--hf", source)
    assert all(word in message for word in words), message


def test_no_model_there(tmp_path, refuse):
    assert "has no config.json" in refuse("to-megatron", "--hf", tmp_path / "nowhere")


def test_config_is_no_json(source, refuse):
    (source / "config.json").write_text("{")
    assert "is no JSON" in refuse("to-megatron", "--hf", source)


def test_missing_shard(source, refuse):
    path = shard_of(source, "model.layers.2.mlp.up_proj.weight")
    path.unlink()
    message = refuse("to-megatron", "--hf", source)
    assert path.name in message
    assert "download it again" in message


def test_damaged_shard(source, refuse):
    path = shard_of(source, "model.layers.2.mlp.up_proj.weight")
    path.write_bytes(path.read_bytes()[:-8])
    assert f"{path.name} is damaged" in refuse("to-megatron", "--hf", source)


def test_damaged_index(source, refuse):
    (source / "model.safetensors.index.json").write_text("[]")
    assert "index.json is damaged" in refuse("to-megatron", "--hf", source)


def test_other_format(source, refuse):
    for path in source.glob("*.safetensors*"):
        path.unlink()
    assert "save_pretrained" in refuse("to-megatron", "--hf", source)


def test_tensor_of_another_architecture(source, refuse):
    path = shard_of(source, "model.norm.weight")
    save_file(load_file(path) | {"model.layers.0.mlp.gate.weight": torch.ones(4)}, path)
    assert "has model.layers.0.mlp.gate.weight" in refuse("to-megatron", "--hf", source)


def test_mixed_types(source, refuse):
    path = shard_of(source, "model.norm.weight")
    save_file(load_file(path) | {"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}, path)
    message = refuse("to-megatron", "--hf", source)
    assert "torch.bfloat16 and torch.float32" in message
    assert "--dtype" in message


def test_target_that_is_taken(source, refuse, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("kept")
    assert "not empty" in refuse("to-megatron", "--hf", source, out=tmp_path / "taken")
    assert "is a file" in refuse("to-megatron", "--hf", source, out=tmp_path / "taken" / "file")
    assert "does not exist" in refuse("to-megatron", "--hf", source, out=tmp_path / "no" / "where")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]


@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_no_room(source, trained, refuse, direction):
    """A limit on the size of files fails a write as a full disk does."""
    words = {"to-megatron": ["--hf", source], "to-hf": ["--megatron", trained]}[direction]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        message = refuse(direction, *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write" in message
    assert "File too large" in message


def test_empty_target_is_used(converted, convert, tmp_path):
    (tmp_path / "made").mkdir()
    convert("to-hf", "--megatron", converted("qwen2 tied gqa4")[1], "--out", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_stopped(tmp_path, kind):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "made") as scratch:
        (scratch / "half").write_text("")
        signal.raise_signal(kind)
    assert list(tmp_path.iterdir()) == []


def test_no_checkpoint_there(tmp_path, refuse):
    assert "latest_checkpointed_iteration.txt" in refuse("to-hf", "--megatron", tmp_path)


def test_tracker_names_nothing(trained, refuse):
    (trained / "latest_checkpointed_iteration.txt").write_text("12")
    assert "iter_0000012" in refuse("to-hf", "--megatron", trained)
    (trained / "latest_checkpointed_iteration.txt").write_text("soon")
    assert "'soon'" in refuse("to-hf", "--megatron", trained)


def test_missing_distcp(trained, refuse):
    next((trained / "release").glob("*.distcp")).unlink()
    message = refuse("to-hf", "--megatron", trained)
    assert "distcp" in message
    assert "copy it again" in message


def test_cut_distcp(trained, refuse):
    path = next((trained / "release").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-100_000])
    assert "copy the checkpoint again" in refuse("to-hf", "--megatron", trained)


def test_damaged_metadata(trained, refuse):
    (trained / "release" / ".metadata").write_bytes(b"\x80\x04")
    assert "is damaged" in refuse("to-hf", "--megatron", trained)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 480}, ["vocabulary of 503", "says 480", "--hf-config"]),
        ({"hidden_size": 64, "head_dim": 8}, ["hidden_size 128", "64", "--hf-config"]),
        ({"tie_word_embeddings": False}, ["tied True", "--hf-config"]),
        ({"model_type": "qwen3"}, ["family qwen2", "qwen3"]),
    ],
    ids=["vocabulary", "hidden size", "untied", "family"],
)
def test_original_of_another_model(source, trained, refuse, fields, words):
    edit(source, **fields)
    message = refuse("to-hf", "--megatron", trained, "--hf-config", source)
    assert all(word in message for word in words), message


def test_exit_code_and_one_line(tmp_path):
    """The tool as users start it."""
    words = [sys.executable, TOOL, "to-megatron", "--hf", tmp_path / "nowhere", "--out", tmp_path / "made"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("convert_qwen: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_plain_lm_head_of_a_tied_model_is_left_out(convert, tmp_path):
    model = make_model("qwen2 tied gqa4")
    hf = save(model, tmp_path / "hf")
    tensors = load_file(hf / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, hf / "model.safetensors"
    )
    convert("to-megatron", "--hf", hf, "--out", tmp_path / "megatron")
    convert("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()
