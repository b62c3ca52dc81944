"""Run one attention layer on several processes, through the module that Megatron builds into its layers.

    torchrun --nproc-per-node 2 examples/one_layer.py

Every rank holds its part of the tokens in layout order; the result is compared with exact attention of the
whole.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from megatron_mtrain import AttentionConfig, make_layout
from megatron_mtrain.core_attention import SparseRingAttention

TOKENS, BATCH, HEADS, KEY_HEADS, HEAD_SIZE = 2048, 1, 4, 2, 32


def main() -> None:
    """Attends random tokens with a sparse and an exact method and prints how far they are from exact
    attention."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    query = torch.randn(TOKENS, BATCH, HEADS, HEAD_SIZE, device=device)
    key, value = torch.randn(2, TOKENS, BATCH, KEY_HEADS, HEAD_SIZE, device=device)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)), is_causal=True, enable_gqa=True
    )
    for attention in (
        AttentionConfig.from_dict("stripe_ring"),
        AttentionConfig.from_dict("minfer", {"pattern_config_name": "Qwen2.5_3B_flex_0.90"}),
    ):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HEADS * HEAD_SIZE,
            num_attention_heads=HEADS,
            num_query_groups=KEY_HEADS,
            context_parallel_size=world_size,
        )
        layer = SparseRingAttention(
            config, layer_number=1, attention=attention, pg_collection=SimpleNamespace(cp=dist.group.WORLD)
        )
        layout = make_layout(attention.layout, TOKENS, world_size, attention.block_size)
        shards = (layout.shard(tensor, 0, rank) for tensor in (query, key, value))
        out = layer(*shards, None)  # [tokens of this rank, batch, heads * head size]
        expected = layout.shard(exact.permute(2, 0, 1, 3).flatten(2), 0, rank)
        error = float((out - expected).norm() / expected.norm())
        if rank == 0:
            print(f"{attention.attn_type:12} {world_size} ranks, distance from exact attention {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
