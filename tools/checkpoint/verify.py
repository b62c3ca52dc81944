"""Compare a Hugging Face model with its Megatron form: the logits of both on random tokens, in float32 on
the CPU.

Megatron's model is built as pretrain_qwen.py builds it, from `--model`, and loaded as it loads it, from
`--load`; so this also tells that a run will start from the converted weights."""

import contextlib
import io
import os
import sys
from pathlib import Path

import torch
from megatron.training import training
from transformers import AutoModelForCausalLM

from megatron_mtrain.arguments import parse_arguments
from megatron_mtrain.cpu import prepare_megatron
from megatron_mtrain.layouts import make_layout
from megatron_mtrain.presets import model_shape
from tools.loaded_model import RUN, gather, load_model

TOKENS = 256  # two blocks of attention
TOLERANCE = 1e-4  # of the largest logit; the order of float32 sums gives about 1e-6


def verify(hf: Path, megatron: Path) -> str:
    """One line that tells how far the logits of the two models are apart. Raises ValueError when it is too
    far."""
    torch.manual_seed(0)
    tokens = torch.randint(0, model_shape(str(hf)).vocab_size, (1, TOKENS))
    expected = hf_logits(hf, tokens)
    flags = ["--model", str(hf), "--load", str(megatron), "--seq-length", str(TOKENS)]
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron tells how it starts
        found = megatron_logits([*flags, *RUN], tokens)[..., : expected.size(-1)]
    error = float((found - expected).abs().max() / expected.abs().max())
    line = f"logits of both models on {TOKENS} random tokens: {error:.1e} of the largest apart"
    if not error < TOLERANCE:
        raise ValueError(f"{line}, more than {TOLERANCE:.0e}; the conversion is wrong")
    return line


def hf_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits float32 [b, N, vocabulary] of transformers' model for tokens [b, N]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(tokens).logits


def megatron_logits(flags: list[str], tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits float32 [b, N, padded vocabulary] of the model that pretrain_qwen.py would start to train with
    `flags`.

    On several ranks, all of which call it, the whole logits on those of the last pipeline stage and None on
    others."""
    arguments = sys.argv
    sys.argv = ["verify", *flags]
    kept = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    try:
        return _logits_of_run(tokens)
    finally:
        sys.argv = arguments
        training.destroy_global_state()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _logits_of_run(tokens: torch.Tensor) -> torch.Tensor | None:
    prepare_megatron()
    loaded = load_model(*parse_arguments())
    groups, (batch, num_tokens) = loaded.groups, tokens.shape
    layout = make_layout(loaded.attention.layout, num_tokens, groups.cp.size(), loaded.attention.block_size)
    positions = layout.positions(groups.cp.rank())

    def call(model):
        return model(tokens[:, positions], positions.expand(batch, -1), None)

    logits = loaded.forward(call, batch=batch, num_tokens=num_tokens)
    if logits is None:
        return None
    return loaded.whole(torch.cat(gather(logits.float(), groups.tp), -1), 1)
