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
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.checkpointing import load_checkpoint
from transformers import AutoModelForCausalLM

from megatron_mtrain.arguments import parse_arguments
from megatron_mtrain.cpu import prepare_megatron
from megatron_mtrain.layouts import make_layout
from megatron_mtrain.model import use_sparse_attention
from megatron_mtrain.presets import model_shape

TOKENS = 256  # two blocks of attention
TOLERANCE = 1e-4  # of the largest logit; the order of float32 sums gives about 1e-6
# What Megatron asks of every run, though this one takes no step.
RUN = (
    *("--tokenizer-type", "NullTokenizer", "--mock-data", "--split", "100,0,0", "--num-workers", "0"),
    *("--micro-batch-size", "1", "--global-batch-size", "1", "--lr", "0", "--train-iters", "1"),
    *(
        "--eval-iters",
        "0",
        "--attn-type",
        "dense",
        "--exit-on-missing-checkpoint",
        "--no-load-optim",
        "--no-load-rng",
    ),
)


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
    args, attention = parse_arguments()
    training.initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = gpt_config_from_args(args)
    use_sparse_attention(config, attention)
    builder = config.get_builder_cls()(config)
    models = builder.build_distributed_models(groups, wrap_with_ddp=False)
    load_checkpoint(models, None, None)
    return _whole_logits(models, tokens, attention, groups)


def _whole_logits(models: list, tokens: torch.Tensor, attention, groups) -> torch.Tensor | None:
    layout = make_layout(attention.layout, tokens.size(1), groups.cp.size(), attention.block_size)
    positions = layout.positions(groups.cp.rank())

    def step(_, model):
        ids = positions.expand(len(tokens), -1)
        return model(tokens[:, positions], ids, None), lambda logits, non_loss_data: logits.float()

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=models,
            num_microbatches=1,
            seq_length=tokens.size(1),
            micro_batch_size=len(tokens),
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not outputs:
        return None
    logits = torch.cat(_gather(outputs[0], groups.tp), -1)
    return layout.unshard(_gather(logits, groups.cp), 1)


def _gather(tensor: torch.Tensor, group) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return parts
