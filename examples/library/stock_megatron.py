"""Stock Megatron with a sparse layer spec: what pretrain_gpt.py of Megatron-LM does with --spec.

    torchrun --nproc-per-node 2 -m examples.library.stock_megatron --context-parallel-size 2
        --spec examples.library.sparse_specs moba --attention-dropout 0 --calculate-per-token-loss ...

Megatron-Core's package has no pretrain_gpt.py. This script deals the batch as that one does, with Megatron's
own get_batch_on_this_cp_rank, and leaves Megatron's rotary positions alone. Data sets and the sum of the loss
are the same everywhere and come from pretrain_qwen.py.
"""

from functools import partial

from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_mtrain.arguments import machine_defaults
from megatron_mtrain.cpu import prepare_megatron
from pretrain_qwen import datasets_provider, loss_sum


def main() -> None:
    """Megatron's own training of a GPT; only the layer spec is another."""
    prepare_megatron()  # lets Megatron run without a GPU
    args = parse_and_validate_args(extra_args_provider=with_machine_defaults)
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )


def with_machine_defaults(parser):
    """Megatron's parser, with the flags as defaults that it needs on a machine without a GPU."""
    parser.set_defaults(**machine_defaults())
    return parser


def forward_step(samples, model):
    """One micro batch: per-token losses [b, s] of this rank's tokens, and how to reduce them."""
    groups = get_attr_wrapped_model(model, "pg_collection")
    batch = get_batch_on_this_cp_rank(next(samples), is_hybrid_cp=False, cp_group=groups.cp)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_sum, batch["loss_mask"])


if __name__ == "__main__":
    main()
