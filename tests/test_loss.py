"""The chunked loss equals plain cross entropy, values and gradients, for every chunk size and split
vocabulary."""

import pytest
import torch

from megatron_mtrain.loss import linear_cross_entropy


def plain(hidden, weight, target, grad):
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    losses = torch.nn.functional.cross_entropy(hidden @ weight.T, target, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses, (hidden, weight), grad.double())


def draw(tokens=50, size=16, vocabulary=97, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, size, generator=generator).to(dtype)
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    grad = torch.rand(tokens, generator=generator)
    grad[::3] = 0  # masked tokens
    return hidden, weight, target, grad


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13), (torch.bfloat16, 1e-2)]
)
def test_equals_plain(chunk, dtype, tolerance):
    hidden, weight, target, grad = draw(dtype=dtype)
    expected = plain(hidden, weight, target, grad)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    losses = linear_cross_entropy(*leaves, target, chunk=chunk)
    grads = torch.autograd.grad(losses, leaves, grad.to(losses.dtype))
    for actual, wanted in zip((losses, *grads), expected, strict=True):
        error = (actual.detach().double() - wanted).norm() / wanted.norm()
        assert error < tolerance


def test_extreme_logits_and_masked_tokens():
    hidden, weight, target, grad = draw()
    losses = linear_cross_entropy(hidden.mul(1e4).requires_grad_(), weight, target, chunk=16)
    assert torch.isfinite(losses).all()
    leaf = hidden.requires_grad_()
    (grad_hidden,) = torch.autograd.grad(linear_cross_entropy(leaf, weight, target, chunk=16), leaf, grad)
    assert not grad_hidden[::3].any()


class SplitVocabulary:
    """The loss and gradients of one rank of a split vocabulary; picklable, for the gang."""

    def __call__(self, rings, rank, beside):
        hidden, weight, target, grad = draw(vocabulary=96)
        size = rings[0].size()
        leaves = [hidden.requires_grad_(), weight.chunk(size)[rank].clone().requires_grad_()]
        losses = linear_cross_entropy(*leaves, target, group=rings[0], chunk=16)
        grads = torch.autograd.grad(losses, leaves, grad)
        return [x.detach().numpy() for x in (losses, *grads)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_vocabulary(gang, size):
    hidden, weight, target, grad = draw(vocabulary=96)
    expected = plain(hidden, weight, target, grad)
    for ranks in gang.run([size], SplitVocabulary()):
        losses, grad_hidden, grad_weight = ([torch.from_numpy(rank[i]) for rank in ranks] for i in range(3))
        for own in losses:
            torch.testing.assert_close(own.double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sum(grad_hidden).double(), expected[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.cat(grad_weight).double(), expected[2], rtol=1e-5, atol=1e-5)
