"""Layer inputs that wait in host memory: the same bits in every gradient, and who is where at what time."""

import gc
import weakref
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import random

from megatron_mtrain import offload
from megatron_mtrain.offload import STAY, LayerInputs, check, offload_layer_inputs, use_offload

LAYERS, TOKENS, HIDDEN = 6, 12, 8


class Decoder(torch.nn.Module):
    """Layers under full recompute as Megatron's block runs them, rotary embedding beside, norm at the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.rotary = torch.randn(TOKENS, 1, 1, HIDDEN)

    def forward(self, hidden):
        for layer in self.layers:

            def run(hidden, rotary, layer=layer):
                return torch.tanh(layer(hidden)) + hidden * rotary[:, :, 0]

            hidden = random.checkpoint(run, False, hidden, self.rotary)
        return self.norm(hidden)


@pytest.fixture(autouse=True)
def without_random_states(monkeypatch):
    monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda: None)


def draw(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, 2, HIDDEN, generator=generator).requires_grad_()


def gradients(decoder, *, batches: int = 1) -> list[torch.Tensor]:
    """Gradients of inputs and weights; all forwards come before the first backward, as in a pipeline."""
    inputs = [draw(seed) for seed in range(batches)]
    outs = [decoder(hidden) for hidden in inputs]
    for out in outs:
        out.square().sum().backward()
    found = [hidden.grad for hidden in inputs] + [weight.grad for weight in decoder.parameters()]
    decoder.zero_grad()
    return found


@pytest.fixture
def travellers(monkeypatch):
    """Everything that was packed, and the order in which things left and arrived."""
    made, events = [], []

    class Watched(offload._Traveller):
        def __init__(self, *args):
            super().__init__(*args)
            self.number = len(made)
            made.append(weakref.ref(self))

        def leave(self, stream):
            events.append(("leave", self.number))
            super().leave(stream)

        def set_out(self, stream):
            if self.here is None:
                events.append(("back", self.number))
            super().set_out(stream)

        def arrive(self, stream):
            events.append(("use", self.number))
            return super().arrive(stream)

    monkeypatch.setattr(offload, "_Traveller", Watched)
    return SimpleNamespace(made=made, events=events)


@pytest.mark.parametrize("batches", [1, 3])
def test_same_bits(batches, travellers):
    expected = gradients(Decoder(), batches=batches)
    decoder = Decoder()
    offload_layer_inputs([SimpleNamespace(decoder=decoder)])
    actual = gradients(decoder, batches=batches)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert len(travellers.made) == batches * (LAYERS + 1)  # the inputs, and what the norm saves
    assert sum(kind == "leave" for kind, _ in travellers.events) == batches * (LAYERS + 1 - STAY)


def test_each_comes_back_while_the_layer_after_it_runs(travellers):
    decoder = Decoder()
    offload_layer_inputs([SimpleNamespace(decoder=decoder)])
    out = decoder(draw())
    assert travellers.events == [("leave", number) for number in range(LAYERS + 1 - STAY)]
    travellers.events.clear()
    out.sum().backward()
    order = travellers.events
    assert [number for kind, number in order if kind == "use"] == list(range(LAYERS, -1, -1))
    for number in range(LAYERS + 1 - STAY):
        assert order.index(("back", number)) == order.index(("use", number + 1)) + 1


def test_nothing_outlives_the_backward(travellers):
    decoder = Decoder()
    offload_layer_inputs([SimpleNamespace(decoder=decoder)])
    alive = []

    def count(module, inputs, output):
        if torch.is_grad_enabled():  # the second forward, in the backward
            alive.append(sum(ref() is not None and ref().here is not None for ref in travellers.made))

    for layer in decoder.layers:
        layer.register_forward_hook(count)
    decoder(draw()).sum().backward()
    gc.collect()
    assert [ref() for ref in travellers.made] == [None] * (LAYERS + 1)
    assert len(alive) == LAYERS
    assert max(alive) <= STAY + 1


def test_evaluation_saves_nothing(travellers):
    decoder = Decoder()
    offload_layer_inputs([SimpleNamespace(decoder=decoder)])
    with torch.no_grad():
        decoder(draw())
    assert not travellers.made


@pytest.mark.parametrize("shape", [(TOKENS, 1, 1, HIDDEN), (TOKENS, 2, HIDDEN // 2), (HIDDEN, HIDDEN)])
def test_other_tensors_stay(shape):
    tensor = torch.zeros(shape)
    assert LayerInputs(HIDDEN).pack(tensor) is tensor


def test_asked_for():
    config = SimpleNamespace(pre_wrap_hooks=[])
    use_offload(config, False)
    assert config.pre_wrap_hooks == []
    use_offload(config, True)
    assert config.pre_wrap_hooks == [offload_layer_inputs]


def arguments(**changed) -> Namespace:
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    plain = {"offload_layer_inputs": True, "distribute_saved_activations": False}
    return Namespace(**plain | full | changed)


def test_check():
    check(arguments())
    check(arguments(offload_layer_inputs=False, recompute_granularity=None))
    for changed in (
        {"recompute_granularity": None},
        {"recompute_granularity": "selective"},
        {"recompute_method": "block"},
        {"distribute_saved_activations": True},
    ):
        with pytest.raises(ValueError, match="--offload-layer-inputs"):
            check(arguments(**changed))


@pytest.mark.gpu
def test_streams_on_a_gpu():
    """The same bits while copies overlap with compute, and less memory after the forward."""
    inputs = [torch.randn(1 << 16, 2, HIDDEN, device="cuda") for _ in range(2)]
    found, kept = [], []
    for offloads in (False, True):
        decoder = Decoder().cuda()
        decoder.rotary = torch.ones(1 << 16, 1, 1, HIDDEN, device="cuda")
        if offloads:
            offload_layer_inputs([SimpleNamespace(decoder=decoder)])
        for hidden in inputs:
            before = torch.cuda.memory_allocated()
            out = decoder(hidden.clone().requires_grad_())
            torch.cuda.synchronize()
            kept.append(torch.cuda.memory_allocated() - before)
            out.square().sum().backward()
            del out
        found.append([weight.grad for weight in decoder.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    size = inputs[0].numel() * 4
    assert kept[1] - kept[3] >= (LAYERS - STAY - 1) * size
