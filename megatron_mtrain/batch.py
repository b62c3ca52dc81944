"""The batch of one rank: its tokens, labels, loss mask and position ids in layout order, cut once per step.

Every later stage (embedding, layers, loss) works on these tokens as they come; nothing is shuffled per layer.
"""

from collections.abc import Iterator

import torch

from .config import AttentionConfig
from .layouts import make_layout

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def next_batch(
    samples: Iterator | None, attention: AttentionConfig, context_group
) -> dict[str, torch.Tensor | None]:
    """This rank's part of the next micro batch: tokens, labels, loss_mask and position_ids, each [b, s] on
    the device.

    `samples` yields whole sequences [b, N]; every tensor-parallel rank reads its own copy, so nothing is
    broadcast. It is None on a pipeline stage that needs no tokens, and so is then every field.
    """
    if samples is None:
        return dict.fromkeys(FIELDS)
    return slice_batch(next(samples), attention, context_group.rank(), context_group.size())


def slice_batch(
    batch: dict[str, torch.Tensor], attention: AttentionConfig, rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """The tokens of `rank` out of whole sequences [b, N]: the same fields [b, N / world_size], in layout
    order.

    Raises ValueError when N cannot be dealt in whole blocks.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    num_tokens = batch["tokens"].size(1)
    layout = make_layout(attention.layout, num_tokens, world_size, attention.block_size)
    positions = layout.positions(rank, device)
    # Copied whole and cut on the device: the copy starts from pinned memory and nobody waits for it.
    return {name: batch[name].to(device, non_blocking=True).index_select(1, positions) for name in FIELDS}
