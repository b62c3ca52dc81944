"""The batch of one rank: its tokens, labels, loss mask and position ids in layout order, cut once per step.

Every later stage (embedding, layers, loss) works on these tokens as they come; nothing is shuffled per layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from .config import AttentionConfig
from .documents import Documents
from .layouts import make_layout

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass
class DocumentParams(PackedSeqParams):
    """The documents of a micro batch on their way to rotary embedding and core attention.

    Megatron hands its PackedSeqParams to every layer, recomputed or not; the tensors stay [s, b, h, d].
    restart  whether positions begin again at 0 in every document
    """

    documents: Documents | None = None
    restart: bool = False


def next_batch(
    samples: Iterator | None, attention: AttentionConfig, context_group, *, restart: bool = False
) -> dict:
    """This rank's part of the next micro batch: tokens, labels, loss_mask and position_ids, each [b, s] on
    the device, and packed_seq_params, DocumentParams or None.

    `samples` yields whole sequences [b, N]; every tensor-parallel rank reads its own copy, so nothing is
    broadcast. It is None on a pipeline stage that needs no tokens, and so is then every field; where
    documents are masked, every stage needs their borders. `restart`: see DocumentParams.
    """
    if samples is None:
        return dict.fromkeys((*FIELDS, "packed_seq_params"))
    rank, world_size = context_group.rank(), context_group.size()
    return slice_batch(next(samples), attention, rank, world_size, restart=restart)


def slice_batch(
    batch: dict[str, torch.Tensor],
    attention: AttentionConfig,
    rank: int,
    world_size: int,
    *,
    restart: bool = False,
) -> dict:
    """The tokens of `rank` out of whole sequences [b, N]: the same fields [b, N / world_size], in layout
    order, and what next_batch adds where the batch has cu_seqlens int32 [b, any].

    Raises ValueError when N cannot be dealt in whole blocks, or cu_seqlens does not describe N tokens.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    num_tokens = batch["tokens"].size(1)
    layout = make_layout(attention.layout, num_tokens, world_size, attention.block_size)
    positions = layout.positions(rank, device)
    # Copied whole and cut on the device: the copy starts from pinned memory and nobody waits for it.
    part = {name: batch[name].to(device, non_blocking=True).index_select(1, positions) for name in FIELDS}
    part["packed_seq_params"] = None
    if "cu_seqlens" in batch:
        documents = Documents.of(batch["cu_seqlens"], num_tokens, len(batch["tokens"]))
        part["packed_seq_params"] = DocumentParams(
            "sbhd", max_seqlen_q=num_tokens, max_seqlen_kv=num_tokens, documents=documents, restart=restart
        )
        if not restart:  # the data set begins anew
            part["position_ids"] = positions.expand_as(part["tokens"])
    return part
