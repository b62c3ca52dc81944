"""Converted models in the project's own GPT model, on every parallel layout, against transformers."""

import pytest
import torch

from tests.tools.checkpoint.tiny_models import MODELS, PROMPT, TOKENS, YARN
from tools.checkpoint.verify import megatron_logits
from tools.loaded_model import RUN

TOLERANCE = 1e-4  # asked of float32; the order of sums gives about 1e-6
LAYOUTS = {
    "tp1": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
}


def check(ranks, model, layout: str, *flags: str) -> None:
    hf, megatron, tokens, expected = model
    count, parallel = LAYOUTS[layout]
    flags = ["--model", str(hf), "--load", str(megatron), "--seq-length", str(TOKENS), *RUN, *flags]
    *_, logits = ranks.run(count, megatron_logits, [*flags, *parallel.split()], tokens)
    logits = logits[..., : expected.size(-1)]
    assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()
    # Every token that transformers chose is also Megatron's choice after the ones before it.
    assert torch.equal(logits[:, PROMPT - 1 : -1].argmax(-1), tokens[:, PROMPT:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2 tied gqa4", "qwen3 untied gqa4"])
def test_logits_on_every_layout(ranks, converted, name, layout):
    check(ranks, converted(name), layout)


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
@pytest.mark.parametrize("name", [name for name in MODELS if "gqa4" not in name])
def test_logits_of_other_groups(ranks, converted, name, layout):
    """As many key heads as heads, and one key head that tensor-parallel ranks share."""
    check(ranks, converted(name), layout)


@pytest.mark.parametrize("layout", ["tp1", "cp2"])
def test_logits_with_yarn(ranks, converted, layout):
    """Past the original length of 128 tokens, where YaRN's frequencies and attention factor tell."""
    check(ranks, converted("qwen2 tied gqa4", rope=YARN), layout)


def test_finetune_loads_the_same(ranks, converted):
    check(ranks, converted("qwen2 tied gqa4"), "tp1", "--finetune", "--no-load-optim", "--no-load-rng")
