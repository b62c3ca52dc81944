"""Layer specs for Megatron's own scripts: `pretrain_gpt.py --spec examples.library.sparse_specs minfer ...`.

Stock Megatron deals tokens and rotary positions in zigzag order, so the methods run on the zigzag layout; the
sequence has to be a multiple of 2 * context parallel size * 128 tokens. Exact attention needs no file of its
own: --spec megatron_mtrain.model layer_spec. Beside the spec, give --attention-dropout 0 and
--no-create-attention-mask-in-dataloader, without which the run is refused, and --calculate-per-token-loss.
"""

from functools import partial

from megatron_mtrain import AttentionConfig
from megatron_mtrain.model import layer_spec

ZIGZAG = {"implementation": "zigzag"}
PATTERN = {"pattern_config_name": "Qwen2.5_3B_flex_0.90"}

minfer = partial(layer_spec, attention=AttentionConfig.from_dict("minfer", PATTERN | ZIGZAG))
moba = partial(
    layer_spec, attention=AttentionConfig.from_dict("moba", {"moba_chunk_size": 128, "moba_topk": 3} | ZIGZAG)
)
xattn = partial(layer_spec, attention=AttentionConfig.from_dict("xattn", ZIGZAG))
