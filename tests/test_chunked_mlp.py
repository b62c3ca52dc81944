"""The MLP in chunks: its results and gradients are Megatron's, and no wide tensor of the whole sequence
exists."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.mlp import MLP
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mtrain.chunked_mlp import REFUSED, check, chunked_forward, run_in_chunks

TOKENS, BATCH, HIDDEN, FFN = 50, 2, 8, 64


class Linear(torch.nn.Linear):
    """Megatron's linear layers return their bias beside their output."""

    def forward(self, x):
        return super().forward(x), None


def mlp(ranks: int = 1, **config) -> MLP:
    """Megatron's MLP around plain linear layers, which need no process group."""
    module = MLP.__new__(MLP)
    torch.nn.Module.__init__(module)
    torch.manual_seed(0)
    module.linear_fc1 = Linear(HIDDEN, 2 * FFN, bias=False)
    module.linear_fc2 = Linear(FFN, HIDDEN, bias=False)
    defaults = {
        "use_te_activation_func": False, "bias_activation_fusion": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0, "sequence_parallel": ranks > 1, "recompute_granularity": None,
        "recompute_method": None, "recompute_num_layers": None,
    }  # fmt: skip
    module.config = SimpleNamespace(**defaults | config)
    module.activation_func = module.config.activation_func
    module.tp_group = SimpleNamespace(size=lambda: ranks)
    return module.double()


def draw():
    generator = torch.Generator().manual_seed(1)
    shape = (TOKENS, BATCH, HIDDEN)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def results(module: MLP, call) -> list[torch.Tensor]:
    """Output, and gradients of the input and of both weights."""
    hidden, grad = draw()
    hidden.requires_grad_()
    out, bias = call(hidden)
    assert bias is None
    out.backward(grad)
    found = [out.detach(), hidden.grad, *(weight.grad for weight in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("tokens", [1, 7, 20, 33, 99, 100, 1000])
def test_equals_plain(tokens):
    module = mlp()
    expected = results(module, module)
    actual = results(module, lambda hidden: chunked_forward(module, hidden, tokens=tokens))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_frozen_weights_get_no_gradient():
    module = mlp()
    module.linear_fc1.weight.requires_grad_(False)
    expected = results(module, module)
    actual = results(module, lambda hidden: chunked_forward(module, hidden, tokens=16))
    assert actual[2] is expected[2] is None
    torch.testing.assert_close(actual[1:2] + actual[3:], expected[1:2] + expected[3:])


class Widest(TorchDispatchMode):
    """Remembers the largest number of elements that a tensor had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(("ranks", "rows"), [(1, 10), (4, 2)])
def test_wide_tensors_have_the_size_of_a_chunk(ranks, rows):
    """20 tokens are 10 rows of a batch of 2; under sequence parallelism the ranks gather that many."""
    module = mlp(ranks)
    with Widest() as plain:
        results(module, module)
    with Widest() as chunked:
        results(module, lambda hidden: chunked_forward(module, hidden, tokens=20))
    assert plain.elements == TOKENS * BATCH * 2 * FFN
    assert chunked.elements == max(rows * BATCH * 2 * FFN, TOKENS * BATCH * HIDDEN, 2 * FFN * HIDDEN)


@pytest.mark.parametrize("layers", [1, 2])
def test_second_forward_of_a_recomputed_layer(layers, monkeypatch):
    """It leaves out the output, which nobody reads, but not where a second layer of the part would."""
    monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda: None)
    parts = []
    plain = MLP.forward

    def counted(module, hidden):
        parts.append(len(hidden))
        return plain(module, hidden)

    module = mlp(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=layers)

    def layer(hidden):
        for _ in range(layers):
            hidden = hidden + chunked_forward(module, hidden, tokens=20)[0]
        return hidden

    def plain_layer(hidden):
        for _ in range(layers):
            hidden = hidden + plain(module, hidden)[0]
        return hidden, None

    expected = results(module, plain_layer)
    monkeypatch.setattr(MLP, "forward", counted)
    actual = results(module, lambda hidden: (random.checkpoint(layer, False, hidden), None))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    times = 2 if layers == 1 else 3 * layers
    assert parts == [10] * 5 * times


def test_hook_replaces_every_forward_and_no_parameter():
    model = torch.nn.ModuleDict({"first": mlp(), "second": mlp()})
    names = list(model.state_dict())
    hidden = draw()[0]
    expected = model["first"](hidden)[0]
    run_in_chunks([model], tokens=10)
    assert list(model.state_dict()) == names
    with Widest() as widest:
        torch.testing.assert_close(model["first"](hidden, padding_mask=None)[0], expected)
    assert widest.elements < TOKENS * BATCH * 2 * FFN


def test_hook_refuses_what_it_cannot_cut():
    class Fused(MLP):
        pass

    other = mlp()
    other.__class__ = Fused
    with pytest.raises(ValueError, match="Fused"):
        run_in_chunks([other], tokens=10)
    with pytest.raises(ValueError, match="none"):
        run_in_chunks([torch.nn.Linear(2, 2)], tokens=10)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_flags(name):
    check(Namespace(mlp_chunk_size=0, **{name: True}))
    with pytest.raises(ValueError, match="leave one out"):
        check(Namespace(mlp_chunk_size=10, **{name: True}))


def test_negative_size():
    with pytest.raises(ValueError, match="-1"):
        check(Namespace(mlp_chunk_size=-1))


@pytest.mark.gpu
def test_peak_on_a_gpu():
    """The peak falls by what the feed-forward activations of the other chunks take."""
    module = mlp().float().cuda()
    hidden = torch.randn(1 << 18, 1, HIDDEN, device="cuda", requires_grad=True)
    peaks = []
    for tokens in (1 << 18, 1 << 12):
        torch.cuda.reset_peak_memory_stats()
        out, _ = chunked_forward(module, hidden, tokens=tokens)
        out.backward(torch.ones_like(out))
        del out
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] - peaks[1] > 3 * FFN * (1 << 18) * 4
