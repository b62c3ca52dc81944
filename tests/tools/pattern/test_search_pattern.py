"""tools/search_pattern.py on small Qwen2 and Qwen3 models: what it captures, finds, writes and refuses."""

import json
import os

import numpy
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from megatron_mtrain import AttentionConfig, make_layout
from megatron_mtrain.index import build_index
from megatron_mtrain.pattern import load_pattern
from tests.tools.checkpoint.tiny_models import HEADS, LAYERS, YARN, make_model, save
from tools.data.indexed import id_type, write_index
from tools.pattern.budgets import sample_rows
from tools.pattern.qwen_layers import QwenLayers
from tools.search_pattern import parse_arguments, run

TOKENS, BLOCK, SAMPLES, RECALL = 256, 32, 2, 0.8
FLAGS = f"""
    --seq-length {TOKENS} --samples {SAMPLES} --rows 40 --recall {RECALL}
    --block-size {BLOCK} --last-q 16 --sink-tokens 2 --local-window 8
""".split()
METHOD = {"block_size": BLOCK, "last_q": 16, "sink_tokens": 2, "local_window": 8}
NAMES = {"qwen2": "qwen2 tied gqa4", "qwen3": "qwen3 untied gqa4"}


@pytest.fixture(scope="module", params=NAMES)
def model(request, tmp_path_factory):
    """(transformers' model, its folder, data prefix of `SAMPLES` documents)."""
    folder = tmp_path_factory.mktemp(request.param)
    made = make_model(NAMES[request.param], rope=YARN if request.param == "qwen2" else None)
    tokens = numpy.random.default_rng(0).integers(0, 250, SAMPLES * TOKENS)
    (folder / "data.bin").write_bytes(tokens.astype(id_type(made.config.vocab_size)).tobytes())
    ones = numpy.ones(SAMPLES, dtype=numpy.int64)
    write_index(folder / "data.idx", id_type(made.config.vocab_size), ones * TOKENS, ones)
    return made, save(made, folder / "hf", max_shard_size="60KB"), folder / "data"


def search(model, out, *flags):
    _, hf, data = model
    return run(parse_arguments([*FLAGS, "--hf", str(hf), "--data", str(data), "--out", str(out), *flags]))


def test_captures_what_attention_sees(model):
    made, hf, _ = model
    tokens = torch.arange(64) * 3
    seen = {}

    def note(attention, args, kwargs):
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        shape = (*hidden.shape[:-1], -1, attention.head_dim)
        query, key = attention.q_proj(hidden).view(shape), attention.k_proj(hidden).view(shape)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        pair = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        seen[attention.layer_idx] = [tensor[0].transpose(0, 1) for tensor in pair]

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in made.model.layers]
    with torch.no_grad():
        made(tokens[None])
    for hook in hooks:
        hook.remove()
    captured = list(QwenLayers(hf, "cpu", torch.float32).run([tokens]))
    assert [layer for layer, *_ in captured] == list(range(LAYERS))
    for layer, _, *pair in captured:
        for ours, theirs in zip(pair, seen[layer], strict=True):
            # The order of float32 sums differs between attention functions.
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fixed", "flex"])
def test_pattern_keeps_what_was_asked_when_it_is_trained_with(model, tmp_path, kind):
    """The report's recall and cost are those of the index that the pattern file gives."""
    out = tmp_path / "pattern.json"
    found = search(model, out, "--kind", kind, "--cap", str(TOKENS))
    pattern = load_pattern(str(out))
    assert (len(pattern), {len(layer) for layer in pattern}) == (LAYERS, {HEADS})
    if kind == "fixed":  # the grid ends with everything
        assert found["heads_below"] == 0
        assert all(head["recall"] >= RECALL for head in found["heads"])
    config = AttentionConfig.from_dict("minfer", {"pattern_config_name": str(out), **METHOD})
    layout = make_layout("stripe", TOKENS, 1, BLOCK)
    _, hf, data = model
    ids = numpy.fromfile(f"{data}.bin", dtype=id_type(250)).astype(numpy.int64).reshape(SAMPLES, TOKENS)
    kept, pairs = torch.zeros(2, LAYERS, HEADS, dtype=torch.float64)
    for layer, sample, query, key in QwenLayers(hf, "cpu", torch.float32).run(list(torch.from_numpy(ids))):
        mask = build_index(config, query[:, None], key[:, None], layout, [], layer).dense_mask()[0]
        rows = sample_rows(TOKENS, 40, sample)
        scores = torch.einsum(
            "thd,uhd->htu", query.double(), key.double().repeat_interleave(HEADS // key.shape[1], 1)
        )
        scores = scores * query.shape[-1] ** -0.5
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        probability = scores.masked_fill(later, -torch.inf).softmax(-1)
        kept[layer] += (probability * mask)[:, rows].sum(-1).mean(-1) / SAMPLES
        pairs[layer] += mask.sum((1, 2)) / SAMPLES
    for head in found["heads"]:
        place = head["layer"], head["head"]
        assert head["recall"] == pytest.approx(float(kept[place]), abs=1e-5)
        assert head["pairs"] == float(pairs[place])


def test_same_search_same_bytes_and_a_report(model, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for out in (first, second):
        search(model, out, "--vertical", "0", "32", "--slash", "0", "8")
    assert first.read_bytes() == second.read_bytes()
    text = first.with_suffix(".report.md").read_text()
    assert "## Weakest heads" in text and text.count("\n| 3 |") >= HEADS
    report = json.loads(first.with_suffix(".report.json").read_text())
    assert len(report["heads"]) == LAYERS * HEADS
    assert 0 < report["density"] < 1


WRONG = {
    "--recall 1.5": "--recall 1.5 must be above 0",
    "--seq-length 250": "not a multiple of --block-size 32; give 224",
    "--samples 9": "less than 9 sequences",
    "--shares 2": "must all be from 0 to 1",
    "--vertical -1": "0 or more",
    "--rope-scaling linear:2": "--rope-scaling linear:2 is unknown",
    "--rows 0": "--rows 0 must be at least 1",
}


@pytest.mark.parametrize("flags", WRONG)
def test_refuses(model, tmp_path, flags):
    with pytest.raises(ValueError, match=WRONG[flags]):
        search(model, tmp_path / "pattern.json", *flags.split())
    assert os.listdir(tmp_path) == []


def test_refuses_what_is_no_model_or_no_place(model, tmp_path):
    made, hf, data = model
    with pytest.raises(ValueError, match="has no config.json"):
        search((made, tmp_path, data), tmp_path / "pattern.json")
    with pytest.raises(ValueError, match="does not exist"):
        search(model, tmp_path / "absent" / "pattern.json")
