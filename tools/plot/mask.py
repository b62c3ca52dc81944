"""Draw what heads attend: of a trained model on a text, or of a method on synthetic queries and keys.

    python -m tools.plot.mask --checkpoint runs/trained --data-path data/mine --layer 0 12 --out mask.png
    python -m tools.plot.mask --attn-type minfer --seq-length 2048 --out mask.png

A checkpoint is what Megatron's --save named, or a Hugging Face folder; the model runs on the CPU, so take a
small one or few tokens. Queries go downwards, keys to the right, attended pairs are dark. Recall is the share
of the exact probability that falls on them, mean over queries.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from megatron_mtrain import AttentionConfig
from megatron_mtrain.config import ATTN_TYPES
from megatron_mtrain.index.draw import HEAD_SIZE, HEADS, config_of, show, synthetic
from tools.plot.figures import new_figure, output_parser, run_picture
from tools.plot.model_heads import Head, examine, head_of, tokens_of


def synthetic_heads(attn_type: str, num_tokens: int, path: str | None = None) -> list[Head]:
    """The heads of draw.py's synthetic queries and keys. Raises ValueError for a length that does not fit."""
    attention = config_of(attn_type, path, num_tokens)
    query, key = (tensor[:, 0].transpose(0, 1) for tensor in synthetic(num_tokens))
    shared = len(query) // len(key)
    sizes = {"layer": 0, "scale": HEAD_SIZE**-0.5, "keep": True}
    return [
        head_of(attention, query[head], key[head // shared], key[head // shared], head=head, **sizes)[0]
        for head in range(HEADS)
    ]


def figure(heads: list[Head], title: str):
    """The masks of `heads`, a row for each layer."""
    layers = sorted({head.layer for head in heads})
    rows = [[head for head in heads if head.layer == layer] for layer in layers]
    across = max(map(len, rows))
    picture, axes = new_figure(len(rows), across, width=0.4 + 2.9 * across, height=0.6 + 3.1 * len(rows))
    for axis in axes.flat:
        axis.set_axis_off()
    for line, row in zip(axes, rows, strict=True):
        for axis, head in zip(line, row, strict=False):
            axis.set_axis_on()
            show(axis, head.mask)
            numbers = f"{head.density:.1%} of pairs, recall {head.recall:.1%}"
            axis.set_title(f"layer {head.layer}, head {head.head}\n{numbers}", fontsize=9)
            axis.tick_params(labelsize=7)
            axis.locator_params(nbins=5)
        line[0].set_ylabel("query position (tokens)", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("key position (tokens)", fontsize=8)
    picture.suptitle(title, fontsize=11)
    return picture


def add_model_arguments(parser: ArgumentParser, *, required: bool) -> None:
    """Adds what says which model runs on which tokens."""
    flag = parser.add_argument
    flag("--checkpoint", type=Path, required=required, help="Megatron checkpoint or Hugging Face folder")
    flag("--data-path", type=Path, required=required, metavar="PREFIX", help="indexed dataset to read from")
    flag("--start", type=int, default=0, help="first token of the dataset to read")
    flag("--seq-length", type=int, default=4096, help="tokens")
    flag("--attn-type", choices=ATTN_TYPES, help="by default that of the checkpoint")
    flag("--train-attn-config", help="YAML file of the method's settings")


def attention_of(args: Namespace) -> AttentionConfig | None:
    """The attention that the command line asks for; None: that of the checkpoint."""
    if args.attn_type is None:
        if args.train_attn_config is not None:
            raise ValueError("--train-attn-config needs --attn-type, the method that it sets")
        return None
    return AttentionConfig.from_yaml(args.attn_type, args.train_attn_config)


def draw(args: Namespace):
    """The picture that the command line asks for."""
    if args.checkpoint is None:
        if args.attn_type is None or args.data_path is not None:
            raise ValueError("give --checkpoint and --data-path, or --attn-type alone for synthetic heads")
        heads = synthetic_heads(args.attn_type, args.seq_length, args.train_attn_config)
        return figure(heads, f"{args.attn_type} on synthetic queries and keys, {args.seq_length} tokens")
    if args.data_path is None:
        raise ValueError("--checkpoint needs --data-path, the tokens that the model reads")
    wanted = {(layer, head) for layer in args.layer for head in args.head}
    tokens = tokens_of(args.data_path, args.seq_length, args.start)
    found, attention = examine(args.checkpoint, tokens, attention_of(args), keep=lambda *_: wanted)
    kept = [head for head in found if head.mask is not None]
    return figure(kept, title_of(attention, args.checkpoint, tokens))


def title_of(attention: AttentionConfig, checkpoint: Path, tokens: torch.Tensor) -> str:
    """What is seen: the method, the checkpoint's name, the length."""
    name = "/".join(checkpoint.resolve().parts[-2:])
    return f"What {attention.attn_type} attends in {name}, {tokens.shape[1]} tokens"


def main() -> None:
    parser = output_parser(__doc__)
    add_model_arguments(parser, required=False)
    parser.add_argument("--layer", type=int, nargs="+", default=[0], help="layers, from 0")
    parser.add_argument("--head", type=int, nargs="+", default=[0, 1, 2, 3], help="query heads, from 0")
    run_picture(parser, draw)


if __name__ == "__main__":
    main()
