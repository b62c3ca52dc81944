"""The model that pretrain_qwen.py would start to train, loaded to see what it makes of whole sequences."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.checkpointing import load_checkpoint

from megatron_mtrain.config import AttentionConfig
from megatron_mtrain.layouts import make_layout
from megatron_mtrain.model import use_sparse_attention

# What Megatron asks of every run, though this one takes no step; flags after these win.
RUN = (
    *("--tokenizer-type", "NullTokenizer", "--mock-data", "--split", "100,0,0", "--num-workers", "0"),
    *("--micro-batch-size", "1", "--lr", "0", "--train-iters", "1", "--eval-iters", "0"),
    *("--attn-type", "dense", "--exit-on-missing-checkpoint", "--no-load-optim", "--no-load-rng"),
)


class LoadedModel(NamedTuple):
    """The model chunks of this rank, their attention and process groups, and the step of their checkpoint."""

    models: list
    attention: AttentionConfig
    groups: ProcessGroupCollection
    iteration: int

    @torch.no_grad()
    def forward(self, call: Callable, *, batch: int, num_tokens: int) -> torch.Tensor | None:
        """What `call(model)` gives on this rank's last pipeline stage, None on other stages.

        `call` runs a chunk of the model on this rank's part of `batch` sequences of `num_tokens` tokens. All
        ranks of a model call this together.
        """

        def step(_, model):
            return call(model), lambda output, non_loss_data: output

        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=self.models,
            num_microbatches=1,
            seq_length=num_tokens,
            micro_batch_size=batch,
            forward_only=True,
            collect_non_loss_data=True,
        )
        return outputs[0] if outputs else None

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The tensor of the whole sequence, in its order, from the part of every context-parallel rank."""
        parts = gather(part, self.groups.cp)
        num_tokens = part.size(dim) * len(parts)
        layout = make_layout(self.attention.layout, num_tokens, len(parts), self.attention.block_size)
        return layout.unshard(parts, dim)


def load_model(args, attention: AttentionConfig) -> LoadedModel:
    """The model of parsed arguments, from the checkpoint that --load names, ready to evaluate."""
    training.initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = gpt_config_from_args(args)
    use_sparse_attention(config, attention)
    models = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    iteration, _ = load_checkpoint(models, None, None)
    for model in models:
        model.eval()
    return LoadedModel(models, attention, groups, iteration)


def gather(tensor: torch.Tensor, group) -> list[torch.Tensor]:
    """The tensor of every rank of the group."""
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return parts
