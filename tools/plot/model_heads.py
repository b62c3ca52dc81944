"""What the heads of a trained model attend on a text, and how much of the probability that keeps.

The model runs on the CPU through transformers, with its sparse attention in place: each layer reads what the
sparse layers before it wrote, as in training. A Megatron checkpoint is converted to a Hugging Face folder
first, in a temporary folder (tools/checkpoint).

Legend: N tokens, h query heads, g key heads, d head size.
"""

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoConfig, AutoModel
from transformers.utils.logging import disable_progress_bar

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention
from tools.data.indexed import read_indexed

CONFIG, TRACKER = "config.json", "latest_checkpointed_iteration.txt"
LONGEST = 16384  # tokens: one head's mask and its probabilities are [N, N]
ROWS = 1024  # queries whose probabilities exist at a time
ATTENTION = "watched_sparse_attention"  # the name in transformers' registry


Keep = Callable[[int, int], Collection[tuple[int, int]]]


def nothing(num_layers: int, num_heads: int) -> Collection[tuple[int, int]]:
    """No mask is kept."""
    return ()


@dataclass(frozen=True)
class Head:
    """One query head: attended share of causal pairs, kept share of the probability (mean over queries), and
    the attended pairs as bool [N, N], where asked for."""

    layer: int
    head: int
    density: float
    recall: float
    mask: torch.Tensor | None = None


def recall(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scale: float) -> float:
    """Share of the softmax over all earlier keys that falls on attended ones, mean over queries.

    query and key [N, d], mask bool [N, N] with nothing in the future.
    """
    kept, position = 0.0, torch.arange(len(key))
    for first in range(0, len(query), ROWS):
        rows = slice(first, first + ROWS)
        scores = query[rows].float() @ key.float().T * scale
        scores.masked_fill_(position > position[rows, None], -torch.inf)
        kept += float((scores.softmax(-1) * mask[rows]).sum())
    return min(1.0, kept / len(query))  # rounding of float32


def density(mask: torch.Tensor) -> float:
    """Attended share of the causal pairs of a mask bool [N, N]."""
    return float(mask.sum()) / (len(mask) * (len(mask) + 1) / 2)


def check_model(checkpoint: Path) -> None:
    """Raises ValueError unless the folder is that of a Hugging Face model or of Megatron checkpoints."""
    if not any((checkpoint / name).is_file() for name in (CONFIG, TRACKER)):
        raise ValueError(
            f"{checkpoint} is neither a Hugging Face folder ({CONFIG}) nor one of Megatron ({TRACKER}); "
            "give one of them"
        )


@contextmanager
def opened(checkpoint: Path) -> Iterator[tuple[Path, AttentionConfig | None]]:
    """(a Hugging Face folder of the model, the attention it was trained with if the checkpoint says so).

    `checkpoint` is such a folder already, or one that Megatron's --save named. Raises ValueError for neither.
    """
    check_model(checkpoint)
    if (checkpoint / CONFIG).is_file():
        yield checkpoint, None
        return
    from megatron_mtrain.checks import attention_config  # Megatron takes seconds to import
    from tools.checkpoint import conversion, torch_dist

    args = torch_dist.TorchDistReader(torch_dist.newest(checkpoint)).args
    attention = attention_config(args) if hasattr(args, "attn_type") else None
    with tempfile.TemporaryDirectory() as folder:
        conversion.to_hf(checkpoint, Path(folder))
        yield Path(folder), attention


def tokens_of(prefix: Path, num_tokens: int, start: int = 0) -> torch.Tensor:
    """num_tokens ids [1, N] of an indexed dataset from token `start` on. Raises ValueError when it is too
    short."""
    if not 1 <= num_tokens <= LONGEST:
        raise ValueError(f"{num_tokens} tokens cannot be drawn; give 1 to {LONGEST}")
    ids = read_indexed(prefix).ids
    if start < 0 or start + num_tokens > len(ids):
        raise ValueError(f"{prefix} has {len(ids)} tokens; {num_tokens} from {start} on are more, give fewer")
    return torch.from_numpy(ids[start : start + num_tokens].astype("int64"))[None]


def examine(
    checkpoint: Path, tokens: torch.Tensor, attention: AttentionConfig | None = None, *, keep: Keep = nothing
) -> tuple[list[Head], AttentionConfig]:
    """(every query head of the model on tokens [1, N], the attention it ran).

    `attention` is by default what the checkpoint was trained with. `keep` says which (layer, head) of so many
    layers and heads have their masks returned. Raises ValueError for a checkpoint that does not say its
    attention, for tokens that are not of its vocabulary or do not fit its layout, and for heads that the
    model has not.
    """
    with opened(checkpoint) as (folder, trained):
        attention = attention or trained
        if attention is None:
            raise ValueError(f"{checkpoint} does not say its attention; give --attn-type")
        sizes = AutoConfig.from_pretrained(folder)
        kept = keep(sizes.num_hidden_layers, sizes.num_attention_heads)
        _check(sizes, tokens, attention, kept)
        found: list[Head] = []
        disable_progress_bar()
        AttentionInterface.register(ATTENTION, watching(attention, found, kept))
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION)
        with torch.no_grad():
            model.eval()(tokens, use_cache=False)
    return found, attention


def _check(sizes, tokens: torch.Tensor, attention: AttentionConfig, keep) -> None:
    make_layout(attention.layout, tokens.shape[1], 1, attention.block_size)
    attention.check_model(num_layers=sizes.num_hidden_layers, num_heads=sizes.num_attention_heads)
    if int(tokens.max()) >= sizes.vocab_size:
        raise ValueError(
            f"token id {int(tokens.max())} is not below the model's vocabulary of {sizes.vocab_size}; give "
            "data of its tokenizer"
        )
    for layer, head in keep:
        if not (0 <= layer < sizes.num_hidden_layers and 0 <= head < sizes.num_attention_heads):
            raise ValueError(
                f"layer {layer}, head {head} is not in a model of {sizes.num_hidden_layers} layers of "
                f"{sizes.num_attention_heads} heads; both count from 0"
            )


def head_of(  # noqa: PLR0913 - a head is its tensors and its place
    attention: AttentionConfig, query, key, value, *, layer: int, head: int, scale: float, keep: bool
) -> tuple[Head, torch.Tensor]:
    """(what a query head attends, its output [N, d]); query, key and value [N, d].

    Raises ValueError when N does not fit the layout.
    """
    layout = make_layout(attention.layout, len(query), 1, attention.block_size)
    how = {"config": attention.with_heads(head), "layout": layout, "rings": [], "layer": layer}
    tensors = (tensor[:, None, None] for tensor in (query, key, value))
    out, index = sparse_ring_attention(*tensors, softmax_scale=scale, return_index=True, **how)
    mask = index.dense_mask()[0, 0]
    share = recall(query, key, mask, scale)
    return Head(layer, head, density(mask), share, mask if keep else None), out[:, 0, 0]


def watching(attention: AttentionConfig, found: list[Head], keep):
    """An attention function for transformers that runs `attention` head by head and notes what it saw."""

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        """query [1, h, N, d], key and value [1, g, N, d] -> [1, N, h, d]."""
        scale, shared, outs = scaling or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1], []
        for head in range(query.shape[1]):
            group, layer = head // shared, module.layer_idx
            tensors = query[0, head], key[0, group], value[0, group]
            place = {"layer": layer, "head": head, "scale": scale, "keep": (layer, head) in keep}
            seen, out = head_of(attention, *tensors, **place)
            found.append(seen)
            outs.append(out)
        return torch.stack(outs, 1)[None], None

    return attend
