"""Pre-train a Qwen2.5-class model with distributed dynamic sparse attention, in Megatron's own training loop.

    torchrun --nproc-per-node 2 pretrain_qwen.py --context-parallel-size 2 --attn-type minfer
        --train-attn-config minfer_qwen2.5_3b_0.90 --data-path data/demo --seq-length 4096 ...

Runs on GPUs with Transformer Engine, or on CPUs with gloo when there is no GPU; the flags are the same. All
flags are Megatron's, plus the group "sparse attention" (megatron_mtrain/arguments.py, which also sets the
Qwen2.5 defaults).
"""

import sys
from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_mtrain.arguments import one_line_errors, parse_arguments
from megatron_mtrain.batch import next_batch
from megatron_mtrain.chunked_mlp import use_chunked_mlp
from megatron_mtrain.config import AttentionConfig
from megatron_mtrain.cpu import prepare_megatron
from megatron_mtrain.dry_run import plan
from megatron_mtrain.guards import explained
from megatron_mtrain.loss import in_chunks
from megatron_mtrain.model import use_sparse_attention
from megatron_mtrain.offload import use_offload
from megatron_mtrain.scope import train_only
from megatron_mtrain.telemetry import Telemetry


def main() -> None:
    """The run: arguments, model, data, training."""
    prepare_megatron()
    with one_line_errors():
        args, attention = parse_arguments()
        model_config = gpt_config_from_args(args)
        use_sparse_attention(model_config, attention)
        use_chunked_mlp(model_config, args.mlp_chunk_size)
        use_offload(model_config, args.offload_layer_inputs)
        train_only(model_config, args.trainable)
        telemetry = Telemetry(args)
        telemetry.attach(model_config)
    if args.dry_run:
        sys.stdout.write(plan(args, attention))
        return
    with explained(), telemetry.written():
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            datasets_provider,
            ModelType.encoder_or_decoder,
            partial(forward_step, attention=attention),
        )


def forward_step(samples, model, *, attention: AttentionConfig):
    """One micro batch through the model: per-token losses [b, s] of this rank's tokens, and how to reduce
    them."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    groups = get_attr_wrapped_model(model, "pg_collection")
    batch = next_batch(samples, attention, groups.cp, restart=get_args().reset_position_ids)
    timers("batch-generator").stop()
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
        **in_chunks(get_args().loss_chunk_size),
    )
    return losses, partial(loss_sum, batch["loss_mask"])


def loss_sum(loss_mask: torch.Tensor, losses: torch.Tensor):
    """(sum of the losses, number of tokens, what to report); Megatron divides by the tokens of all ranks."""
    loss = (losses.float() * loss_mask).sum()
    if get_args().check_for_nan_in_loss_and_grad:
        for is_bad, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {what} in the loss of this rank",
                tolerance=0.0,
                fatal=True,
            )
    num_tokens = loss_mask.sum()
    report = torch.stack([loss.detach(), num_tokens.detach()])
    return loss, num_tokens.to(torch.int), {"lm loss": report}


def datasets_provider(num_samples: list[int], vp_stage: int | None = None):
    """Training, validation and test sets of whole sequences, on the pipeline stages that read them: for
    tokens, labels, or the borders of documents."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=get_tokenizer(),
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        inter_document_masking=args.dataloader_inter_document_masking,
        reset_position_ids=False,  # by cu_seqlens, see batch.py, and not by end-of-document tokens
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    borders = args.dataloader_inter_document_masking
    reads_data = (lambda: True) if borders else partial(is_first_or_last_pipeline_stage, vp_stage)
    return BlendedMegatronDatasetBuilder(dataset, num_samples, reads_data, config).build()


datasets_provider.is_distributed = True  # every rank builds its own; see batch.py

if __name__ == "__main__":
    main()
