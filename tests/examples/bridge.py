"""The loss of a small model that a provider of Megatron-Bridge builds, with and without sparse attention.

Megatron-Bridge (0.6) does not install beside the tested transformers, so `Provider` stands in for its
GPTModelProvider: a TransformerConfig that builds a GPTModel from `transformer_layer_spec`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from examples.library.bridge_provider import use_sparse_attention
from megatron_mtrain import AttentionConfig
from megatron_mtrain.cpu import prepare_megatron

TOKENS, VOCABULARY = 512, 256
METHODS = {
    "zigzag_ring": {"block_size": 32},
    "moba": {"moba_chunk_size": 64, "moba_topk": 3, "block_size": 32, "implementation": "zigzag"},
}


@dataclass(kw_only=True)
class Provider(TransformerConfig):
    """The fields and the method of Bridge's GPTModelProvider that matter here."""

    transformer_layer_spec: Callable
    vocab_size: int = VOCABULARY
    seq_length: int = TOKENS
    position_embedding_type: str = "rope"

    def provide(self, vp_stage: int | None = None) -> GPTModel:
        """The model, as Bridge builds it."""
        return GPTModel(
            self,
            transformer_layer_spec=self.transformer_layer_spec(self, vp_stage=vp_stage),
            vocab_size=self.vocab_size,
            max_sequence_length=self.seq_length,
            position_embedding_type=self.position_embedding_type,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )


def main(provider_class: type = Provider) -> None:
    """Prints the loss of Megatron's own layers (on one rank) and of each of METHODS on all ranks."""
    prepare_megatron()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    own = [("own", None)] if ranks == 1 else []
    for name, fields in [*own, *METHODS.items()]:
        provider = provider_class(
            num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2,
            context_parallel_size=ranks, use_cpu_initialization=True, attention_dropout=0.0,
            hidden_dropout=0.0, init_method_std=0.2, vocab_size=VOCABULARY, seq_length=TOKENS,
            position_embedding_type="rope", apply_rope_fusion=False, gradient_accumulation_fusion=False,
            transformer_layer_spec=lambda config, vp_stage=None: get_gpt_layer_local_spec(),
        )  # fmt: skip
        if fields is not None:
            use_sparse_attention(provider, AttentionConfig.from_dict(name, fields))
        sys.stdout.write(f"{name}: {loss(provider):.6f}\n")


def loss(provider) -> float:
    """The mean loss of random tokens, dealt as Bridge deals them."""
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    model = provider.provide()
    sequence = torch.randint(VOCABULARY, (1, TOKENS + 1))
    batch = {
        "tokens": sequence[:, :-1],
        "labels": sequence[:, 1:],
        "position_ids": torch.arange(TOKENS)[None],
    }
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    losses.mean().backward()
    total = losses.detach().sum()
    dist.all_reduce(total)
    return float(total) / TOKENS
