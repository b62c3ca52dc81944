"""Small random Qwen2 and Qwen3 models, made and saved by transformers."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

HEADS, LAYERS, TOKENS, PROMPT = 8, 4, 512, 448
CLASSES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
# name: (family, tied embeddings, query heads of a key head, vocabulary, padded on 2 ranks when odd)
MODELS = {
    "qwen2 tied gqa4": ("qwen2", True, 4, 503),
    "qwen2 untied gqa1": ("qwen2", False, 1, 256),
    "qwen3 tied gqa8": ("qwen3", True, 8, 320),
    "qwen3 untied gqa4": ("qwen3", False, 4, 257),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}


def make_model(name: str, *, rope: dict | None = None, dtype: torch.dtype = torch.float32):
    """A model of MODELS in transformers, with biases and norms that are not what they begin with."""
    family, tied, ratio, vocabulary = MODELS[name]
    config, model = CLASSES[family]
    torch.manual_seed(len(name))
    # Qwen3's heads together are wider than its hidden size, as in the 0.6B.
    sizes = {"hidden_size": 64, "head_dim": 16} if family == "qwen3" else {"hidden_size": 128}
    made = model(
        config(
            vocab_size=vocabulary,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // ratio,
            tie_word_embeddings=tied,
            max_position_embeddings=1024,
            initializer_range=0.1,
            rope_parameters=rope or {"rope_type": "default", "rope_theta": 1e6},
            **sizes,
        )
    )
    for key, param in made.named_parameters():
        if "norm" in key or key.endswith("bias"):
            torch.nn.init.normal_(param, 1.0 if "norm" in key else 0.0, 0.3)
    return made.to(dtype).eval()


def save(model, folder: Path, **settings) -> Path:
    """The model as a folder of safetensors, with something in place of a tokenizer."""
    model.save_pretrained(folder, **settings)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "none"}\n')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def greedy(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [1, TOKENS] of a random prompt and what the model continues it with, and their logits."""
    prompt = torch.randint(
        0, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(7)
    )
    settings = {"max_new_tokens": TOKENS - PROMPT, "min_new_tokens": TOKENS - PROMPT, "do_sample": False}
    with torch.no_grad():
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings)
        return tokens, model(tokens).logits.float()
