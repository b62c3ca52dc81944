"""What the ranks of test_run.py do; they import it, pytest alone does not need Megatron."""

import torch


def evaluated(words: list[str]) -> dict | None:
    """A command line of tools/eval/run.py on this rank."""
    from tools.eval.run import evaluate

    return evaluate(words)


def scored(flags: list[str], tokens: torch.Tensor, vocabulary: int) -> torch.Tensor | None:
    """score_tokens of the model that flags of pretrain_qwen.py name."""
    import sys

    import torch.distributed as dist
    from megatron.training import training

    from megatron_mtrain.arguments import parse_arguments
    from megatron_mtrain.cpu import prepare_megatron
    from tools.eval.scores import score_tokens
    from tools.loaded_model import RUN, load_model

    sys.argv = ["scored", *RUN, *flags]
    try:
        prepare_megatron()
        return score_tokens(load_model(*parse_arguments()), tokens, vocabulary)
    finally:
        training.destroy_global_state()
        if dist.is_initialized():
            dist.destroy_process_group()
