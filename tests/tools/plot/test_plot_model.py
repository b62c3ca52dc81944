"""What a model's heads attend: against naive sums, and through transformers."""

import numpy
import pytest
import torch
from transformers import AutoModel, Qwen2Config, Qwen2ForCausalLM

from megatron_mtrain import AttentionConfig
from tools.checkpoint import conversion
from tools.data.indexed import write_index
from tools.plot import heads, mask
from tools.plot.model_heads import ATTENTION, examine, recall, tokens_of

LAYERS, HEADS, TOKENS = 2, 4, 256
XATTN = AttentionConfig.from_dict("xattn", {"granularity": 32, "stride": 8, "threshold": 0.5})


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A random Qwen2 as a Hugging Face folder."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": 100}
    config = Qwen2Config(num_attention_heads=HEADS, num_key_value_heads=2, initializer_range=0.3, **sizes)
    folder = tmp_path_factory.mktemp("hf")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """An indexed dataset of 1000 tokens below 100."""
    prefix, ids = tmp_path_factory.mktemp("data") / "text", numpy.arange(1000) * 7 % 100
    prefix.with_suffix(".bin").write_bytes(ids.astype(numpy.uint16).tobytes())
    lengths = numpy.array([600, 400])
    write_index(prefix.with_suffix(".idx"), numpy.dtype("uint16"), lengths, numpy.ones(2, numpy.int64))
    return prefix


def test_recall_by_hand():
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 40, 8, generator=generator)
    attended = (torch.rand(40, 40, generator=generator) < 0.4).tril()
    expected = 0.0
    for t in range(40):
        weights = (query[t].double() @ key[: t + 1].double().T * 0.3).softmax(-1)
        expected += float(weights[attended[t, : t + 1]].sum()) / 40
    assert recall(query, key, attended, 0.3) == pytest.approx(expected, rel=1e-5)
    assert recall(query, key, torch.ones(40, 40, dtype=torch.bool).tril(), 0.3) == pytest.approx(1.0)


def test_exact_attention_is_that_of_transformers(hf, data):
    tokens = tokens_of(data, TOKENS)
    found, _ = examine(hf, tokens, AttentionConfig.from_dict("dense"), keep=lambda *_: {(1, 3)})
    assert [(head.layer, head.head) for head in found] == [
        (i, j) for i in range(LAYERS) for j in range(HEADS)
    ]
    assert all(head.density == 1 and head.recall == pytest.approx(1) for head in found)
    assert [head.mask is not None for head in found] == [False] * 7 + [True]
    assert torch.equal(found[-1].mask, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())
    outputs = []
    for kind in ("eager", ATTENTION):  # the registered function still runs the attention of examine
        model = AutoModel.from_pretrained(hf, dtype=torch.float32, attn_implementation=kind)
        with torch.no_grad():
            outputs.append(model(tokens).last_hidden_state)
    assert torch.allclose(*outputs, atol=1e-4)


def test_sparse_heads_of_a_megatron_checkpoint(hf, data, tmp_path, is_picture):
    checkpoint = tmp_path / "megatron"
    checkpoint.mkdir()
    conversion.to_megatron(hf, checkpoint)
    tokens = tokens_of(data, TOKENS, 100)
    found, attention = examine(checkpoint, tokens, XATTN, keep=lambda layers, heads: {(0, 0), (1, 2)})
    assert attention is XATTN
    again, _ = examine(hf, tokens, XATTN)
    assert [(head.density, head.recall) for head in found] == [(head.density, head.recall) for head in again]
    assert all(0 < head.density < 1 and 0.3 < head.recall < 1 for head in found)
    for head in found:
        if head.mask is not None:
            assert head.density == pytest.approx(float(head.mask.sum()) / (TOKENS * (TOKENS + 1) / 2))
    is_picture(mask.figure([head for head in found if head.mask is not None], "two heads"))
    table = heads.of_heads(found, "all heads")
    assert table.values["recall"][1, 2] == found[6].recall
    is_picture(heads.figure(table))
    with pytest.raises(ValueError, match="does not say its attention; give --attn-type"):
        examine(checkpoint, tokens)


def test_what_a_model_cannot_run(hf, data, tmp_path):
    tokens, dense = tokens_of(data, TOKENS), AttentionConfig.from_dict("dense")
    with pytest.raises(ValueError, match="neither a Hugging Face folder"):
        examine(tmp_path, tokens, dense)
    with pytest.raises(ValueError, match="layer 2, head 0 is not in a model of 2 layers of 4 heads"):
        examine(hf, tokens, dense, keep=lambda *_: {(2, 0)})
    with pytest.raises(ValueError, match="token id 100 is not below the model's vocabulary of 100"):
        examine(hf, tokens + 1, dense)
    with pytest.raises(ValueError, match="sequence length 200 is not a multiple"):
        examine(hf, tokens[:, :200], dense)
    with pytest.raises(ValueError, match="has 1000 tokens; 256 from 800 on are more"):
        tokens_of(data, TOKENS, 800)
    with pytest.raises(ValueError, match="cannot be drawn; give 1 to 16384"):
        tokens_of(data, 1 << 20)


def test_command_lines(hf, data, tmp_path, call):
    out = tmp_path / "x.png"
    model = ("--checkpoint", hf, "--data-path", data, "--seq-length", TOKENS, "--attn-type", "dense")
    assert call(mask, *model, "--layer", 1, "--head", 0, 2, "--out", out) is None
    assert out.read_bytes().startswith(b"\x89PNG")
    assert call(heads, *model, "--out", out) is None
    out.unlink()
    assert "is not in a model" in call(mask, *model, "--layer", 7, "--out", out)
    assert "give --checkpoint and --data-path, or --attn-type" in call(mask, "--out", out)
    assert "--checkpoint needs --data-path" in call(mask, "--checkpoint", hf, "--out", out)
    assert "needs --attn-type" in call(mask, *model[:6], "--train-attn-config", "x", "--out", out)
    assert "give --run, or" in call(heads, "--out", out)
    assert not out.exists()


def test_synthetic_masks(tmp_path, call):
    found = mask.synthetic_heads("minfer", 512)
    assert [head.head for head in found] == [0, 1, 2, 3]
    assert all(0 < head.density < 0.5 < head.recall < 1 for head in found)
    out = tmp_path / "x.png"
    assert call(mask, "--attn-type", "moba", "--seq-length", 512, "--out", out) is None
    assert out.read_bytes().startswith(b"\x89PNG")
    refused = call(mask, "--attn-type", "moba", "--seq-length", 1000, "--out", tmp_path / "y.png")
    assert "sequence length 1000 is not a multiple" in refused
