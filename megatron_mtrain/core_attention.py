"""SparseRingAttention: distributed sparse attention behind Megatron's core_attention contract.

Legend: s tokens of this rank, b batch, h query heads of this rank, g key heads of this rank, d head dim, W
context-parallel ranks. The module has no parameters and adds nothing to a checkpoint.
"""

from collections import deque
from collections.abc import Callable

import torch
from megatron.core.transformer.module import MegatronModule

from .attention import Setting, check_shards, ring_attention, ring_forward
from .clock import now
from .config import AttentionConfig
from .documents import Documents
from .guards import Watch
from .index import build_index
from .layouts import make_layout
from .passes import Passes
from .ring import communicate
from .samples import Sample, sample


class SparseRingAttention(MegatronModule):
    """Attention over the tokens of all context-parallel ranks, this rank's part of them in and out.

    Built by Megatron from a layer spec; `attention` comes from the spec's params. Raises ValueError when the
    process groups do not fit the parallel sizes: without this check a missing group would quietly train every
    rank on its own tokens alone.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type=None,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection=None,
        *,
        attention: AttentionConfig,
    ):
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(
                f"attention type {attention_type!r} cannot run here; only causal self attention can"
            )
        self.attention = attention
        self.layer = layer_number - 1  # Megatron counts from 1, across pipeline stages
        self.softmax_scale = softmax_scale
        self.watch, self.passes = Watch(self.layer), Passes(self.layer)
        self.sampled: Callable[[], bool] = lambda: False  # whether to take notes for telemetry.py
        self.samples: list[Sample] = []
        self.kept: deque = deque()  # what the first forward of a recomputed layer left for the second one
        self.recomputed = getattr(config, "recompute_granularity", None) is not None
        self.world_size = config.context_parallel_size
        rings = attention_rings(pg_collection, self.world_size, two_level=attention.two_level)
        self.rings = communicate(rings, attention.ring_comm)
        self.tensor_rank = pg_collection.tp.rank() if getattr(pg_collection, "tp", None) is not None else 0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """query [s, b, h, d], key and value [s, b, g, d] in layout order -> [s, b, h * d].

        Attention is causal by position, in each of the documents of batch.DocumentParams; a mask, a bias or
        other packed sequences raise ValueError.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("an attention mask or bias cannot be used: this attention is causal by position")
        if packed_seq_params is not None and packed_seq_params.qkv_format != "sbhd":
            raise ValueError(
                f"packed sequences ({packed_seq_params.qkv_format}) cannot be used; give whole ones"
            )
        num_tokens = query.size(0) * self.world_size
        documents = getattr(packed_seq_params, "documents", None)
        if documents is not None:
            documents = Documents.of(documents, num_tokens, query.size(1))
        layout = make_layout(self.attention.layout, num_tokens, self.world_size, self.attention.block_size)
        tensors = [tensor.contiguous() for tensor in (query, key, value)]
        check_shards(*tensors, layout, self.rings)
        self.watch.see(**dict(zip(("query", "key", "value"), tensors, strict=True)))
        return self._attend(*tensors, layout, documents).flatten(2)

    def _attend(self, query, key, value, layout, documents) -> torch.Tensor:
        """Attention; a recomputed forward takes over what the first one kept, in the order of micro batches.

        Under activation recomputation Megatron runs a layer twice, first without gradients: whatever is a
        function of the same query and key need not be made again.
        """
        scale = query.size(-1) ** -0.5 if self.softmax_scale is None else self.softmax_scale
        setting = Setting(self.rings, scale, self.attention.backend, self.passes)
        recomputed = self.recomputed and self.training
        again = recomputed and bool(self.kept) and torch.is_grad_enabled()
        index, known = self.kept.popleft() if again else (None, None)
        samples = self.training and not again and self.sampled()
        begun = now() if samples else None
        if index is None:
            index = self._build_index(query, key, layout, scale, documents)
        if samples:
            built = (begun, now())
            known = ring_forward(query, key, value, index, setting)
            self.samples.append(sample(index, built, query, key, known[1], rings=self.rings, scale=scale))
        if recomputed and not torch.is_grad_enabled():
            known = known or ring_forward(query, key, value, index, setting)
            reuse = self.attention.reuse
            self.kept.append((None if reuse == "nothing" else index, known if reuse == "output" else None))
            return known[0]
        return ring_attention(query, key, value, index, setting, known)

    @torch.no_grad()
    def _build_index(self, query, key, layout, scale: float, documents):
        # Head counts come from the tensors: Megatron rewrites the config when there are fewer key heads than
        # ranks.
        config = self.attention.with_heads(self.tensor_rank * query.size(2))
        known = {"softmax_scale": scale, "documents": documents}
        return build_index(config, query, key, layout, self.rings, self.layer, **known)


def attention_rings(pg_collection, world_size: int, *, two_level: bool) -> list:
    """The process groups that key and value travel on, inner to outer, for `world_size` context-parallel
    ranks.

    One group for a flat ring, two for a two-level ring, none for a single rank. Raises ValueError when a
    group is missing or has another size.
    """
    if world_size == 1:
        return []
    if not two_level:
        rings, flag = [getattr(pg_collection, "cp", None)], "--context-parallel-size"
    else:
        rings = list(getattr(pg_collection, "hcp", None) or [None])
        flag = "--hierarchical-context-parallel-sizes INNER OUTER"
    if None in rings:
        raise ValueError(
            f"no process groups for {world_size} context-parallel ranks; start Megatron with {flag}"
        )
    sizes = [group.size() for group in rings]
    if torch.Size(sizes).numel() != world_size or (two_level and len(rings) != 2):
        raise ValueError(
            f"context-parallel groups of sizes {sizes} do not make {world_size} ranks"
            f"{' on two levels' if two_level else ''}; set {flag} to match --context-parallel-size"
        )
    return rings
