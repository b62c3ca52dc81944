"""Train a Qwen2 of transformers in plain PyTorch: FSDP2 shards the weights, a ring of ranks the tokens.

    torchrun --nproc-per-node 2 examples/library/hugging_face_fsdp.py

Three things make a model of transformers run on a ring: an attention function in its registry, each rank's
tokens in layout order, and their positions. Any number of ranks gives the same losses.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention

TOKENS, STEPS, VOCABULARY = 512, 3, 256
ATTENTION = AttentionConfig.from_dict("moba", {"moba_chunk_size": 64, "moba_topk": 3, "block_size": 32})


def ring_attention(module, query, key, value, attention_mask, scaling=None, **_unused):
    """transformers' contract: query [b, h, s, d], key and value [b, g, s, d] -> ([b, s, h, d], None)."""
    shards = [tensor.permute(2, 0, 1, 3).contiguous() for tensor in (query, key, value)]
    layout = make_layout(ATTENTION.layout, TOKENS, dist.get_world_size(), ATTENTION.block_size)
    settings = {"config": ATTENTION, "layout": layout, "layer": module.layer_idx, "softmax_scale": scaling}
    out = sparse_ring_attention(*shards, rings=[dist.group.WORLD], **settings)
    return out.transpose(0, 1), None


def main() -> None:
    """Trains a small random model on random tokens and prints the loss of each step."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_default_device(f"cuda:{rank % torch.cuda.device_count()}" if on_gpu else "cpu")
    torch.manual_seed(0)
    AttentionInterface.register("sparse_ring", ring_attention)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TOKENS}
    config = Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads, attn_implementation="sparse_ring")
    model = Qwen2ForCausalLM(config)
    for part in (*model.model.layers, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    layout = make_layout(ATTENTION.layout, TOKENS, ranks, ATTENTION.block_size)
    sequence = torch.randint(VOCABULARY, (1, TOKENS + 1))
    tokens, labels = (layout.shard(part, 1, rank) for part in (sequence[:, :-1], sequence[:, 1:]))
    positions = layout.positions(rank, tokens.device)[None]
    for step in range(STEPS):
        logits = model(input_ids=tokens, position_ids=positions).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS
        (loss * ranks).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
