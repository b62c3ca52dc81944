"""Measures a small Megatron model on the CPU: parameters, and bytes that layers keep for the backward.

    python -m tests.tools.plan.measured_layer

Prints one JSON object: `parameters` of the whole model and, in bf16, the bytes of all tensors that one layer
saves (each storage once, parameters left out): `layer` as it is, `chunked` with the MLP in chunks.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_mtrain import AttentionConfig
from megatron_mtrain.chunked_mlp import run_in_chunks
from megatron_mtrain.cpu import prepare_megatron
from megatron_mtrain.model import layer_spec

LAYERS, HIDDEN, FFN, HEADS, GROUPS, HEAD, VOCABULARY = 2, 64, 192, 4, 2, 16, 512
TOKENS, BATCH, CHUNK = 256, 2, 64


def main() -> None:
    prepare_megatron()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model = build()
    found = {"parameters": sum(param.numel() for param in model.parameters()), "layer": saved_bytes(model)}
    run_in_chunks([model], tokens=CHUNK)
    found["chunked"] = saved_bytes(model)
    sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def build() -> GPTModel:
    """A Qwen2.5 of toy size, tied, with exact attention."""
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        num_query_groups=GROUPS, kv_channels=HEAD, normalization="RMSNorm", layernorm_epsilon=1e-6,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        add_qkv_bias=True, attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bf16=True, transformer_impl="local",
    )  # fmt: skip
    attention = AttentionConfig.from_dict("dense", {"block_size": 64})
    spec = layer_spec(config, attention=attention)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModel(
        config, spec, VOCABULARY, TOKENS, share_embeddings_and_output_weights=True,
        position_embedding_type="rope", rotary_base=1_000_000, pg_collection=groups,
    )  # fmt: skip
    return model.to(torch.bfloat16).train()


def saved_bytes(model: GPTModel) -> int:
    """Bytes that the second layer saves for its backward, its input included."""
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    rotary = model.rotary_pos_emb(TOKENS)
    parameters = {param.untyped_storage().data_ptr() for param in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, _ = model.decoder.layers[1](hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
    assert out.shape == hidden.shape
    return sum(storage.nbytes() for storage in storages.values())


if __name__ == "__main__":
    main()
