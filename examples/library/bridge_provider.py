"""Sparse attention in a model of Megatron-Bridge: its provider gets another layer spec.

    torchrun --nproc-per-node 8 -m examples.library.bridge_provider Qwen/Qwen2.5-3B

Megatron-Bridge deals tokens and rotary positions in zigzag order, as stock Megatron does, so the method runs
on the zigzag layout. Nothing else changes: recipes, checkpoints and conversion stay Bridge's own.
"""

import sys
from functools import partial

from megatron_mtrain import AttentionConfig
from megatron_mtrain.model import layer_spec

MINFER = {"pattern_config_name": "Qwen2.5_3B_flex_0.90", "implementation": "zigzag"}


def use_sparse_attention(provider, attention: AttentionConfig) -> None:
    """Makes a GPTModelProvider build layers that run `attention`.

    Raises ValueError when the pattern file is not that of the model.
    """
    provider.attention_dropout = 0.0
    attention.check_model(num_layers=provider.num_layers, num_heads=provider.num_attention_heads)
    provider.transformer_layer_spec = partial(layer_spec, attention=attention)


def main() -> None:
    """Loads a model of Hugging Face on eight context-parallel ranks, ready for Bridge's training loop."""
    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_pretrained(sys.argv[1]).to_megatron_provider()
    provider.context_parallel_size = 8
    provider.calculate_per_token_loss = True
    use_sparse_attention(provider, AttentionConfig.from_dict("minfer", MINFER))
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    print(provider.provide_distributed_model())


if __name__ == "__main__":
    main()
