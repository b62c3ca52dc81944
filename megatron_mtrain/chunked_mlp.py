"""--mlp-chunk-size: Megatron's MLP, a chunk of the sequence at a time, made again in the backward.

The feed-forward activations of a long sequence are the widest tensors of a layer: at 524288 tokens of a 3B
model on one GPU the output of fc1 alone takes 23 GB, and full recompute of layers holds all of it while a
layer runs backward. Here only a chunk's exist at a time.

Megatron 0.19 has two things near by, and neither bounds that: `--mlp-chunks-for-training` cuts the sequence
but keeps what every chunk saves, and `--recompute-modules mlp` remakes the whole sequence at once (the two
exclude each other, and full recompute).

The module is Megatron's own, with its parameters and checkpoint keys; only its forward is replaced, after the
model is built and before it is wrapped. Legend: s tokens of this tensor-parallel rank, b batch, h hidden
size.
"""

from argparse import Namespace
from functools import partial

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.mlp import MLP

# destination -> (flag, why it cannot be used with chunks); refused when the value is true.
REFUSED = {
    "fp8": ("--fp8-format", "scales would be taken from a chunk"),
    "fp4": ("--fp4-format", "scales would be taken from a chunk"),
    "tp_comm_overlap": ("--tp-comm-overlap", "its buffers have the size of the whole sequence"),
    "add_bias_linear": ("linear biases", "the last one is added outside of the MLP"),
    "num_experts": ("--num-experts", "experts choose among all tokens"),
    "delay_wgrad_compute": ("--delay-wgrad-compute", "weight gradients are made chunk by chunk"),
    "use_transformer_engine_op_fuser": ("--use-transformer-engine-op-fuser", "it replaces Megatron's MLP"),
}


def check(args: Namespace) -> None:
    """Raises ValueError for flags that --mlp-chunk-size cannot run with, and for a negative size."""
    if args.mlp_chunk_size < 0:
        raise ValueError(f"--mlp-chunk-size {args.mlp_chunk_size} must be a number of tokens, or 0: all")
    for name, (flag, reason) in REFUSED.items():
        if args.mlp_chunk_size and getattr(args, name, None):
            raise ValueError(f"--mlp-chunk-size cannot run with {flag}: {reason}; leave one out")


def use_chunked_mlp(model_config, tokens: int) -> None:
    """Makes the MLPs of a Megatron GPTModelConfig run `tokens` at a time; 0: all at once."""
    if tokens:
        model_config.pre_wrap_hooks.append(partial(run_in_chunks, tokens=tokens))


def run_in_chunks(models: list, tokens: int) -> list:
    """A pre-wrap hook: every MLP in the model chunks of this rank holds activations of `tokens` at most.

    Raises ValueError for an MLP that is not Megatron's plain one, and when there is none.
    """
    found = [module for model in models for module in model.modules() if isinstance(module, MLP)]
    other = {type(module).__name__ for module in found} - {"MLP"}
    if other or not found:
        kinds = ", ".join(sorted(other)) or "none"
        raise ValueError(f"--mlp-chunk-size runs Megatron's MLP, and this model has {kinds}; leave it out")
    for mlp in found:
        mlp.forward = partial(chunked_forward, mlp, tokens=tokens)
    return models


def chunked_forward(mlp: MLP, hidden: torch.Tensor, *, tokens: int, **_unused):
    """What mlp(hidden) returns, (output [s, b, h], no bias), with activations of `tokens` tokens.

    Under sequence parallelism a chunk counts what the tensor-parallel ranks gather. A row of the batch is
    never cut: at least b tokens (times the ranks) exist.
    """
    ranks = mlp.tp_group.size() if mlp.config.sequence_parallel else 1
    rows = max(1, tokens // (hidden.size(1) * ranks))
    if rows >= hidden.size(0):
        return MLP.forward(mlp, hidden)
    return _Chunks.apply(hidden, mlp, rows, _output_is_dropped(mlp.config)), None


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, mlp, rows, output_is_dropped):
        ctx.save_for_backward(hidden)
        ctx.mlp, ctx.rows = mlp, rows
        out = torch.zeros(hidden.shape, dtype=mlp.linear_fc2.weight.dtype, device=hidden.device)
        if not output_is_dropped:
            for part, place in zip(hidden.split(rows), out.split(rows), strict=True):
                place.copy_(MLP.forward(mlp, part)[0])
        return out

    @staticmethod
    def backward(ctx, grad_out):
        (hidden,) = ctx.saved_tensors
        grad = torch.empty_like(hidden)
        parts = zip(hidden.split(ctx.rows), grad_out.split(ctx.rows), grad.split(ctx.rows), strict=True)
        for part, part_grad, place in parts:
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                out, _ = MLP.forward(ctx.mlp, leaf)
            # Adds to the weights' gradients too: under Megatron's wrapper in float32, chunk by chunk.
            torch.autograd.backward(out, part_grad)
            place.copy_(leaf.grad)
        return grad, None, None, None


def _output_is_dropped(config) -> bool:
    """Whether this is the second forward of a layer that is recomputed on its own.

    There the output of the layer, into which the MLP's is added last, is thrown away: the backward of a sum
    needs no values. Leaving it out makes chunks as fast as plain full recompute.
    """
    alone = config.recompute_method == "block" or config.recompute_num_layers == 1
    again = torch.is_grad_enabled() and is_checkpointing()
    return config.recompute_granularity == "full" and alone and again
