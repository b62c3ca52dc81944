"""Queries and keys of a Hugging Face Qwen model as its attention sees them, one layer in memory at a time."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from megatron_mtrain import yarn
from megatron_mtrain.presets import PRETRAINED_LENGTH
from megatron_mtrain.qwen_shape import from_hf, to_hf
from tools.checkpoint.qwen_folder import read_config
from tools.checkpoint.safetensors_folder import SafetensorsFolder

CLASSES = {
    "qwen2": (Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}
CAPTURING = "mtrain_capturing"  # an attention function of transformers, by name


class QwenLayers:
    """The layers of the model in `folder`, run with exact attention in `dtype` on `device`.

    `rope_scaling` extends the context as the flag of pretrain_qwen.py does. Raises ValueError for a folder
    that holds no Qwen2, Qwen2.5 or dense Qwen3 model.
    """

    def __init__(self, folder: Path, device: str, dtype: torch.dtype, rope_scaling: str | None = None):
        raw = read_config(folder)
        self.shape = from_hf(raw, str(folder / "config.json"))
        if rope_scaling is not None:
            original = (
                self.shape.yarn.original
                if self.shape.yarn
                else min(PRETRAINED_LENGTH, self.shape.max_positions)
            )
            self.shape = replace(self.shape, yarn=yarn.parse(rope_scaling, original))
            raw = to_hf(self.shape, raw)
        config, self.layer_class, rotary = CLASSES[self.shape.family]
        self.config = config.from_dict(dict(raw))
        self.config._attn_implementation = CAPTURING
        self.rotary = rotary(self.config).to(device)
        self.device, self.dtype = device, dtype
        self.tensors = SafetensorsFolder(folder)
        # A base model saved alone has no prefix.
        self.prefix = "" if "embed_tokens.weight" in self.tensors.names() else "model."

    @torch.no_grad()
    def run(self, samples: list[torch.Tensor]) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(layer, sample, query [N, h, d], key [N, g, d]) after rotary embedding; samples are int64 [N].

        Layer by layer, and the samples one after the other in each. Raises ValueError for a missing weight.
        """
        ALL_ATTENTION_FUNCTIONS.register(CAPTURING, _capturing_attention)
        embedding = self._read("embed_tokens.weight")
        hidden = [embedding[tokens].to(self.dtype) for tokens in samples]
        del embedding
        for number in range(self.shape.num_layers):
            layer = self._layer(number)
            for sample, states in enumerate(hidden):
                states = states[None].to(self.device)
                places = torch.arange(states.size(1), device=self.device)[None]
                rotary = self.rotary(states, places)
                states = layer(states, attention_mask=None, position_ids=places, position_embeddings=rotary)
                query, key = layer.self_attn.captured
                hidden[sample] = states[0].cpu()
                yield number, sample, query[0].transpose(0, 1), key[0].transpose(0, 1)

    def _layer(self, number: int) -> torch.nn.Module:
        with torch.device("meta"):
            layer = self.layer_class(self.config, number)
        weights = {name: self._read(f"layers.{number}.{name}") for name in layer.state_dict()}
        weights = {name: weight.to(self.device, self.dtype) for name, weight in weights.items()}
        layer.load_state_dict(weights, assign=True)
        return layer.eval()

    def _read(self, name: str) -> torch.Tensor:
        try:
            return self.tensors.read(self.prefix + name)
        except KeyError:
            raise ValueError(
                f"{self.tensors.folder} has no tensor {self.prefix}{name}, which its config.json asks for; "
                "download it again"
            ) from None


def _capturing_attention(module, query, key, value, attention_mask, scaling: float, **_unused):
    """Exact causal attention that leaves query [b, h, N, d] and key [b, g, N, d] at the module."""
    module.captured = query, key
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None
