"""Floating-point operations of a training step, and the rate that a GPU can reach.

Counted are the operations that the model needs, as in the usual model FLOPs utilisation (PaLM, arXiv
2204.02311, appendix B): the forward, and twice as much for the backward. What recomputation does again is not
counted; neither are norms, activations, the softmax, nor the index.
"""

from .qwen_shape import QwenShape

# Dense bf16 TFLOP/s of data sheets, by a part of the name that CUDA reports.
PEAK_TFLOPS = {"H200": 989.5, "H100": 989.5, "B200": 2250.0, "A100": 312.0}


def linear_flops(shape: QwenShape, tokens: int) -> int:
    """Operations of all matrix products with weights in a step over `tokens` tokens, the output layer
    included."""
    width = (2 * shape.num_heads + 2 * shape.num_groups) * shape.head_dim
    layer = shape.hidden_size * (width + 3 * shape.ffn_hidden_size)
    return 6 * tokens * (shape.num_layers * layer + shape.vocab_size * shape.hidden_size)


def attention_flops(shape: QwenShape, seq_length: int, sequences: int, density: float) -> float:
    """Operations of attention in a step over `sequences` sequences.

    Per attended pair, head and element of a head the forward does two multiplications and two additions, the
    backward twice that: 12. `density` is the share of the causal pairs that is attended; 1 is exact.
    """
    pairs = seq_length * (seq_length + 1) / 2 * density
    return 12 * shape.head_dim * shape.num_heads * shape.num_layers * sequences * pairs


def peak_tflops(device: str) -> float | None:
    """bf16 TFLOP/s of a GPU by its name, or None for one that is not in the table."""
    return next((rate for name, rate in PEAK_TFLOPS.items() if name in device), None)


def utilisation(flops: float, seconds: float, gpus: int, peak: float | None) -> float | None:
    """Share of the GPUs' peak rate (TFLOP/s) that `flops` in `seconds` are; None without a peak."""
    return None if peak is None else flops / seconds / gpus / peak / 1e12
