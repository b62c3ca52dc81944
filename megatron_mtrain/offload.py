"""--offload-layer-inputs: what full recompute keeps, the input of every layer, waits in host memory.

A layer's input leaves when it is saved, on a stream of its own while the next layers compute, and comes back
while the layer after it runs backward. The last two of a forward stay: the backward wants them at once.

Why not what exists: Megatron's `--cpu-offloading-num-layers` refuses recompute, and its
`--fine-grained-activation-offloading` offloads inside of layers, whose activations full recompute does not
keep. torch's save_on_cpu runs with recompute, but the host and the compute stream wait for every copy, and
it moves the rotary embedding, which all layers share, once per layer.

Host memory per rank: layers * tokens * hidden size * 2 bytes for bf16, pinned, which torch rounds up to a
power of two for each tensor. Without a GPU the same path runs with plain copies.
"""

from argparse import Namespace
from functools import partial

import torch

STAY = 2  # the input of the last layer, and what the final norm saves


def check(args: Namespace) -> None:
    """Raises ValueError where --offload-layer-inputs has nothing to offload, or cannot tell what."""
    if not args.offload_layer_inputs:
        return
    if args.recompute_granularity != "full" or args.recompute_method != "uniform":
        raise ValueError(
            "--offload-layer-inputs offloads what full recompute keeps; add --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1, or leave it out"
        )
    if args.distribute_saved_activations:
        raise ValueError(
            "--offload-layer-inputs cannot run with --distribute-saved-activations, which cuts layer inputs "
            "into pieces; use --sequence-parallel"
        )


def use_offload(model_config, offload: bool) -> None:
    """Makes the model of a Megatron GPTModelConfig keep its layer inputs in host memory, when asked."""
    if offload:
        model_config.pre_wrap_hooks.append(offload_layer_inputs)


def offload_layer_inputs(models: list) -> list:
    """A pre-wrap hook: every training forward of a decoder saves its layer inputs through `LayerInputs`."""
    for model in models:
        decoder = model.decoder
        saved = LayerInputs(decoder.config.hidden_size)
        forward = decoder.forward
        decoder.forward = partial(_forward, forward, saved)
    return models


def _forward(forward, saved: "LayerInputs", *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    saved.start()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        out = forward(*args, **kwargs)
    saved.start()  # lets go of this forward: only its graph may keep what comes back
    return out


class LayerInputs:
    """What the backward needs of one decoder: tensors [s, b, hidden_size] travel, all others stay.

    Every forward makes a chain of its own, so that micro batches of a pipeline may overlap.
    """

    def __init__(self, hidden_size: int):
        self.hidden_size = hidden_size
        self.chain: list[_Traveller] = []
        self.out = self.back = None  # streams: to the host, and from it

    def start(self) -> None:
        """Begins an empty chain."""
        self.chain = []
        if self.out is None and torch.cuda.is_initialized():
            self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()

    def pack(self, tensor: torch.Tensor):
        """Called by autograd for every tensor that the forward saves."""
        if tensor.dim() != 3 or tensor.size(-1) != self.hidden_size:
            return tensor
        traveller = _Traveller(tensor, self.chain[-1] if self.chain else None)
        self.chain.append(traveller)
        if len(self.chain) > STAY:
            # Not right away: then the last ones would travel for nothing.
            self.chain.pop(0).leave(self.out)
        return traveller

    def unpack(self, saved) -> torch.Tensor:
        """Called by autograd when the backward asks for it."""
        if not isinstance(saved, _Traveller):
            return saved
        tensor = saved.arrive(self.back)
        if saved.previous is not None:
            saved.previous.set_out(self.back)
        return tensor


class _Traveller:
    """One tensor, on the device, in host memory, or on its way between them."""

    def __init__(self, tensor: torch.Tensor, previous: "_Traveller | None"):
        self.here, self.there, self.arrived = tensor, None, None
        self.device, self.previous = tensor.device, previous

    def leave(self, stream) -> None:
        """Copies to host memory after what the compute stream has been given so far."""
        tensor, self.here = self.here, None
        self.there = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.type == "cuda"
        )
        if self.device.type != "cuda":
            self.there.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.there.copy_(tensor, non_blocking=True)
        self.arrived = stream.record_event()
        tensor.record_stream(stream)  # its memory is reused only after the copy

    def set_out(self, stream) -> None:
        """Starts the way back, when it is in host memory."""
        if self.here is not None:
            return
        self.here = torch.empty(self.there.shape, dtype=self.there.dtype, device=self.device)
        if self.device.type != "cuda":
            self.here.copy_(self.there)
        else:
            stream.wait_event(self.arrived)
            stream.wait_stream(torch.cuda.current_stream())  # which may still use that memory
            with torch.cuda.stream(stream):
                self.here.copy_(self.there, non_blocking=True)
            self.here.record_stream(stream)
            self.arrived = stream.record_event()
        self.there = None

    def arrive(self, stream) -> torch.Tensor:
        """The tensor, ready for the compute stream."""
        self.set_out(stream)
        if self.device.type == "cuda" and self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
        return self.here
