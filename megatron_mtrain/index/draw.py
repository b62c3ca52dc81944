"""Draws what a method attends, on synthetic queries and keys: `python -m megatron_mtrain.index.<method> --out
mask.png`.

The keys have what real layers have: a sink at the start, a few heavy hitters, and a preference for near
tokens that falls off differently in every head.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from ..attention import sparse_ring_attention
from ..config import AttentionConfig
from ..layouts import make_layout

HEADS, GROUPS, HEAD_SIZE = 4, 2, 64


def main(attn_type: str) -> None:
    """Command line of one method: draws the masks of four heads into a PNG file."""
    parser = argparse.ArgumentParser(
        description=f"draw what {attn_type} attends on synthetic queries and keys"
    )
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens")
    parser.add_argument("--train-attn-config", help="YAML file; by default settings that fit the length")
    args = parser.parse_args()
    try:
        config = config_of(attn_type, args.train_attn_config, args.seq_length)
        layout = make_layout(config.layout, args.seq_length, 1, config.block_size)
    except ValueError as error:
        parser.error(str(error))
    query, key = synthetic(args.seq_length)
    _, index = sparse_ring_attention(
        query, key, key, config=config, layout=layout, rings=[], return_index=True
    )
    draw(index.dense_mask()[0], args.out, f"{attn_type}, {args.seq_length} tokens")


def config_of(attn_type: str, path: str | None, num_tokens: int) -> AttentionConfig:
    """The configuration in `path`, or one whose budgets suit a short sequence."""
    if path is not None:
        return AttentionConfig.from_yaml(attn_type, path)
    block = max(16, num_tokens // 64)
    if attn_type == "moba":
        return AttentionConfig.from_dict(
            attn_type, {"moba_chunk_size": 4 * block, "moba_topk": 4, "block_size": block}
        )
    if attn_type == "xattn":
        return AttentionConfig.from_dict(attn_type, {"granularity": block, "stride": 8, "threshold": 0.8})
    if attn_type == "minfer":
        entry = ["vertical_and_slash", 16, 6, 1]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([{str(head): entry for head in range(HEADS)}], file)
            file.flush()
            fields = {"pattern_config_name": file.name, "block_size": block, "local_window": block}
            return AttentionConfig.from_dict(attn_type, fields)
    return AttentionConfig.from_dict(attn_type, {"block_size": block})


def synthetic(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """query [N, 1, HEADS, HEAD_SIZE] and key [N, 1, GROUPS, HEAD_SIZE] with sinks, heavy hitters and
    locality."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(num_tokens, 1, HEADS, HEAD_SIZE, generator=generator)
    key = torch.randn(num_tokens, 1, GROUPS, HEAD_SIZE, generator=generator)
    # Slow rotations: the product of two tokens' first dimensions falls off with their distance.
    angle = torch.arange(num_tokens)[:, None] * torch.logspace(-3.5, -1, 8)
    waves = torch.cat([angle.cos(), angle.sin()], -1) * 2.5
    query[:, 0, :, :16] += waves[:, None] * torch.linspace(0.3, 1.2, HEADS)[:, None]
    key[:, 0, :, :16] += waves[:, None]
    hitters = torch.randint(num_tokens, (12,), generator=generator)
    query[..., 16:24] += 2.0
    key[:4, ..., 16:24] += 4.0
    key[hitters, ..., 16:24] += 3.0
    return query, key


def draw(mask: torch.Tensor, path: Path, title: str) -> None:
    """Writes one picture per head of a bool [heads, N, N] mask: queries down, keys across, attended dark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heads, num_tokens = mask.shape[:2]
    figure, axes = pyplot.subplots(1, heads, figsize=(3.6 * heads, 4), squeeze=False, layout="constrained")
    causal = num_tokens * (num_tokens + 1) / 2
    for head, axis in enumerate(axes[0]):
        show(axis, mask[head])
        axis.set_title(f"head {head}: {mask[head].sum() / causal:.0%} of causal pairs", fontsize=9)
        axis.set_xlabel("key position")
    axes[0, 0].set_ylabel("query position")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def show(axis, mask: torch.Tensor) -> None:
    """Draws a bool [N, N] mask into a matplotlib axis; a pixel is as dark as the root of its attended share,
    so that a single column is seen among many keys."""
    num_tokens = len(mask)
    size = max(1, num_tokens // 512)  # pixels are means over size x size tokens
    pixels = torch.nn.functional.avg_pool2d(mask.float()[None], size)[0].sqrt()
    axis.imshow(pixels, cmap="Blues", vmin=0, vmax=1, extent=(0, num_tokens, num_tokens, 0))
