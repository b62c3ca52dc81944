"""Bytes of every part of a training step on one GPU; memory.py adds them up, and says how each is known.

Legend: T tokens of a context-parallel rank times micro batch, s of them per sequence, H hidden, F
feed-forward and V vocabulary size, h query heads and g key heads of a tensor-parallel rank, d head size. All
sizes are bytes unless they say otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_mtrain.offload import STAY
from megatron_mtrain.qwen_shape import QwenShape

ATTENTION = ("norm before attention", "rotary factors", "query, key, value", "attention out and lse")


@dataclass(frozen=True)
class Run:
    """What decides the memory of a run. Sizes are in tokens; parallel sizes in ranks.

    ring_comm is how shards travel: ring, or allgather, with those of all ranks there at once.
    columns and moba are the widest budgets of minfer (columns a head) and moba (chunk size, chunks a token).
    """

    shape: QwenShape
    seq_length: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    transformer_engine: bool = True
    recompute: str = "none"
    attn_type: str = "dense"
    attn_reuse: str = "index"
    ring_comm: str = "ring"
    block_size: int = 128
    columns: int = 4096
    moba: tuple[int, int] = (4096, 12)
    loss_chunk_size: int = 2048
    mlp_chunk_size: int = 0
    offload_layer_inputs: bool = False

    def __post_init__(self):
        unit = self.cp * self.block_size
        if self.seq_length % unit:
            low = self.seq_length // unit * unit
            raise ValueError(
                f"seq_length {self.seq_length} is not a multiple of cp {self.cp} * block {self.block_size} = "
                f"{unit}; nearest {low} or {low + unit}"
            )
        if self.shape.num_layers % self.pp:
            raise ValueError(f"{self.shape.num_layers} layers cannot be split among pp {self.pp} stages")
        if self.shape.num_heads % self.tp:
            raise ValueError(f"{self.shape.num_heads} query heads cannot be split among tp {self.tp} ranks")
        if self.offload_layer_inputs and self.recompute != "full":
            raise ValueError(
                "--offload-layer-inputs offloads what full recompute keeps; add --recompute full"
            )

    @property
    def local_tokens(self) -> int:
        """s: tokens of a sequence on one context-parallel rank."""
        return self.seq_length // self.cp

    @property
    def tokens(self) -> int:
        """T: tokens of a micro batch on one context-parallel rank."""
        return self.local_tokens * self.micro_batch

    @property
    def heads(self) -> tuple[int, int]:
        """Query and key heads of one tensor-parallel rank."""
        return self.shape.num_heads // self.tp, max(1, self.shape.num_groups // self.tp)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of hidden states between layers, bf16."""
        split = self.tp if self.sequence_parallel else 1
        return self.tokens // split * self.shape.hidden_size * 2

    @property
    def chunked_mlp(self) -> bool:
        """Whether the MLP runs in more than one chunk."""
        return 0 < self.mlp_chunk_size < self.tokens

    @property
    def ffn(self) -> int:
        """F of one tensor-parallel rank."""
        return self.shape.ffn_hidden_size // self.tp


def parameters(run: Run, stage: int) -> int:
    """Parameters on one rank of a pipeline stage; the tied embedding is on the first and the last."""
    shape, hidden = run.shape, run.shape.hidden_size
    qkv = (shape.num_heads + 2 * shape.num_groups) * shape.head_dim // run.tp
    layer = qkv * (hidden + shape.qkv_bias) + shape.num_heads * shape.head_dim // run.tp * hidden
    layer += 3 * run.ffn * hidden + 2 * hidden + 2 * shape.head_dim * shape.qk_norm
    total = layer * (shape.num_layers // run.pp)
    first, last = stage == 0, stage == run.pp - 1
    tables = int(first) + int(last and not (first and shape.tied))
    return total + tables * (-(-shape.vocab_size // run.tp) * hidden) + last * hidden


def resident(run: Run, stage: int) -> dict[str, int]:
    """Bytes that are there all the time."""
    count = parameters(run, stage)
    shards = run.dp * run.cp if run.distributed_optimizer else 1
    tokens, rotary = run.tokens * (3 * 8 + 4), run.local_tokens * run.shape.head_dim * 4
    return {
        "weights (bf16)": 2 * count,
        "gradients (fp32)": 4 * count,
        "master weights, Adam (fp32)": 12 * count // shards,
        "batch, rotary embedding": tokens + rotary,
    }


def layer_saves(run: Run) -> dict[str, int]:
    """Bytes that one layer saves for its backward, by what saves them; its own input is under `norm`."""
    shape, T, te = run.shape, run.tokens, run.transformer_engine
    h, g = run.heads
    # torch's RMSNorm, as local layers use it, keeps float32 copies of its input and of the result.
    rows = run.hidden_bytes // 2 // shape.hidden_size
    norm = run.hidden_bytes * (2 if te else 5) + rows * 4
    mlp = run.ffn * T * 2 * (3 if te else 5)  # without fusion also silu's result and a shifted copy
    # Transformer Engine's norm is a part of the MLP, and of its chunks.
    norm_in_chunks = run.chunked_mlp and te
    return {
        "norm before attention": norm,
        "rotary factors": 0 if te else 4 * run.local_tokens * shape.head_dim * 2,
        "query, key, value": T * (h + 2 * g) * shape.head_dim * 2,
        "attention out and lse": T * h * (shape.head_dim * 2 + 4),
        "norm before MLP": run.hidden_bytes if norm_in_chunks else norm,
        "MLP": 0 if run.chunked_mlp else mlp,
    }


def index_bytes(run: Run) -> tuple[int, int]:
    """Bytes of (an index as it is kept, the lists of one ring step in both directions)."""
    h, g = run.heads
    b, s = run.micro_batch, run.local_tokens
    blocks, local = run.seq_length // run.block_size, s // run.block_size
    slots = local
    if run.attn_type == "moba":
        chunk, topk = run.moba
        slots = min(local, -(-chunk // run.block_size))
    lists = 2 * 4 * b * h * local * slots
    if run.attn_type == "minfer":
        columns = min(run.columns, s)
        gathered = 2 * 2 * b * g * run.shape.head_dim * (s + h // g * columns)
        return b * h * (blocks + run.seq_length), lists + gathered + b * h * local * columns // 8
    if run.attn_type == "moba":
        words = -(-run.seq_length // chunk // 32)
        return 4 * b * h * s * (words + topk - 1), lists
    if run.attn_type == "xattn":
        return b * h * local * blocks, lists + b * h * local * local
    return 0, lists


def saved(run: Run, stage: int) -> dict[str, int]:
    """Bytes that the forward of all layers of a stage has saved, for all micro batches in flight."""
    layers, flight = run.shape.num_layers // run.pp, run.pp - stage
    if run.recompute != "full":
        kept = {f"layers: {name}": layers * flight * size for name, size in layer_saves(run).items()}
        return kept | {"layers: index": layers * flight * index_bytes(run)[0]}
    # One more than stays, since the next one is on its way.
    inputs = min(layers, STAY + 1) if run.offload_layer_inputs else layers
    index = 0 if run.attn_reuse == "nothing" else index_bytes(run)[0]
    out = layer_saves(run)["attention out and lse"] if run.attn_reuse == "output" else 0
    return {
        "layer inputs": inputs * flight * run.hidden_bytes,
        "kept index": layers * flight * index,
        "kept attention out and lse": layers * flight * out,
    }


def host_bytes(run: Run) -> int:
    """Pinned host memory of one rank, tensors rounded up to a power of two as torch does."""
    if not run.offload_layer_inputs:
        return 0
    return run.shape.num_layers // run.pp * run.pp * (1 << (run.hidden_bytes - 1).bit_length())


def attention_backward(run: Run) -> dict[str, int]:
    """Bytes of the widest moment of the attention's backward, beside what its layer saved."""
    h, g = run.heads
    d, T, ring = run.shape.head_dim, run.tokens, run.cp > 1
    query, keys = T * h * d, 2 * T * g * d
    lists = index_bytes(run)[1] + T * h * 4  # lse in the kernels' base
    casts = (query + keys) * 2
    visitors = run.cp if run.ring_comm == "allgather" else 2
    return {
        "gradient of attention out": query * 2 + T * h * 4,
        "dq accumulators (fp32)": query * 4 * (2 if ring else 1),
        "dk, dv accumulators (fp32)": keys * 4 * (3 if ring else 1),
        "visiting keys and values": keys * 2 * (visitors if ring else 0),
        "tile lists and columns, or casts of dq, dk, dv": max(lists, casts),
    }


def moments(run: Run, stage: int) -> Iterator[tuple[str, dict[str, int]]]:
    """(name, bytes by part) of the moments that can be the widest of a step on a pipeline stage."""
    again = layer_saves(run) if run.recompute == "full" else {}
    if again and run.transformer_engine:
        again["norm before attention"] -= run.hidden_bytes  # the layer's input, which is there already
    backward = {"gradients of hidden states": 2 * run.hidden_bytes}
    attention = {f"layer again: {name}": again[name] for name in ATTENTION if again}
    yield "attention backward", attention | backward | attention_backward(run)
    mlp = {f"layer again: {name}": size for name, size in again.items()}
    yield "MLP backward", mlp | backward | mlp_backward(run)
    if stage == run.pp - 1:
        yield "loss", loss_moment(run)


def mlp_backward(run: Run) -> dict[str, int]:
    """Bytes of the widest moment of the MLP's backward, beside what its layer saved.

    That is the activation's backward: the gradient of its result is as large as the result, which is gone by
    then, and that of its input is twice as large.
    """
    hidden = run.shape.hidden_size
    parts = {"gradient of a weight": 2 * run.ffn * hidden * 2}
    if run.chunked_mlp:
        chunk = replace(run, mlp_chunk_size=0)
        saves = layer_saves(chunk)["MLP"] * run.mlp_chunk_size // run.tokens
        wide = saves + 2 * run.ffn * run.mlp_chunk_size * 2
        return parts | {
            "feed-forward of a chunk": wide,
            "result and gradient of chunks": 2 * run.hidden_bytes,
        }
    whole = run.tokens * hidden * 2 if run.sequence_parallel else 0
    wide = 2 * run.ffn * run.tokens * 2
    return parts | {"feed-forward gradients": wide, "gathered hidden states": 2 * whole}


def loss_moment(run: Run) -> dict[str, int]:
    """Bytes around the output layer and the loss."""
    shape, vocabulary = run.shape, -(-run.shape.vocab_size // run.tp)
    parts = {
        "hidden states and their gradient": 2 * run.tokens * shape.hidden_size * 2 + 2 * run.hidden_bytes
    }
    if not run.loss_chunk_size:
        return parts | {"logits of all tokens": run.tokens * vocabulary * (2 + 4 + 4)}
    chunk = min(run.loss_chunk_size, run.tokens)
    table = vocabulary * shape.hidden_size
    return parts | {
        "logits of a chunk": chunk * vocabulary * 2,
        "gradient of the output layer": table * (4 + 2),
    }
