"""Distributed dynamic sparse attention as a context-parallel backend of Megatron-Core."""

from .attention import sparse_ring_attention
from .config import AttentionConfig
from .layouts import make_layout

__all__ = ["AttentionConfig", "make_layout", "sparse_ring_attention"]
