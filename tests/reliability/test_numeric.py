"""Hard numbers through every method and number format: enormous logits, ties everywhere, zeros, NaN."""

import math

import pytest
import torch

from megatron_mtrain import AttentionConfig, guards, make_layout, sparse_ring_attention
from megatron_mtrain.kernels.merge import merge
from megatron_mtrain.kernels.tiles import Tiles, attend, attend_backward
from tests.oracle import naive_attention, relative_error
from tests.ring.cases import Case, write_pattern

TOKENS, BLOCK, HEADS, GROUPS, SIZE = 64, 8, 4, 2, 16
METHODS = ["dense", "zigzag_ring", "stripe_ring", "minfer", "moba", "xattn"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fields(attn_type, folder) -> dict:
    """Settings of a method at the test's size; minfer has fixed and flex heads."""
    if attn_type == "minfer":
        budgets = [["vertical_and_slash", 5, 3, 1], ["flex_vertical_and_slash", [0.9, 20], [0.9, 9], 1]] * 2
        probe = {"last_q": 8, "sink_tokens": 2, "local_window": 5}
        return {
            "pattern_config_name": write_pattern(folder / "p.json", [budgets]),
            "block_size": BLOCK,
            **probe,
        }
    if attn_type == "moba":
        return {"moba_chunk_size": 2 * BLOCK, "moba_topk": 2, "block_size": BLOCK}
    if attn_type == "xattn":
        return {"granularity": BLOCK, "stride": 4, "threshold": 0.8}
    return {"block_size": BLOCK}


def extreme(query, key, value):
    """Logits up to 1e4 in magnitude."""
    key.mul_(1e4 * SIZE**0.5 / (query.norm(dim=-1).max() * key.norm(dim=-1).max()))


def one_token(query, key, value):
    """The same token at every place."""
    for tensor in (query, key, value):
        tensor.copy_(tensor[:1].clone())


def equal_keys(query, key, value):
    """Every key ties with every other."""
    key.copy_(key[:1].clone())


def zeros(query, key, value):
    """Zero vectors only."""
    for tensor in (query, key, value):
        tensor.zero_()


def half_padding(query, key, value):
    """The second half of the sequence is one padding token, of zero value."""
    for tensor in (query, key):
        tensor[TOKENS // 2 :] = tensor[:1]
    value[TOKENS // 2 :] = 0


HARD = [extreme, one_token, equal_keys, zeros, half_padding]


def tensors(dtype, seed=0):
    """query, key, value, grad_out of the test's size."""
    drawn = Case("dense", {}, TOKENS, 1, HEADS, GROUPS, SIZE, seed=seed).tensors(0)
    return [tensor.to(dtype) for tensor in drawn]


def run(attn_type, folder, leaves):
    """One call on a single rank: (out, index)."""
    config = AttentionConfig.from_dict(attn_type, fields(attn_type, folder))
    layout = make_layout(config.layout, TOKENS, 1, BLOCK)
    return sparse_ring_attention(*leaves, config=config, layout=layout, rings=[], return_index=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("hard", HARD, ids=lambda change: change.__name__)
@pytest.mark.parametrize("attn_type", METHODS)
def test_hard_numbers(tmp_path, attn_type, hard, dtype):
    *leaves, grad_out = tensors(dtype)
    hard(*leaves)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out, index = run(attn_type, tmp_path, leaves)
    grads = torch.autograd.grad(out, leaves, grad_out)
    mask = index.dense_mask()
    assert mask.any(-1).all() and not mask.triu(1).any()
    assert all(tensor.isfinite().all() and tensor.dtype == dtype for tensor in (out, *grads))
    expected = naive_attention(*leaves, mask, grad_out)
    # A logit of size x is rounded by x * eps in float32, and so is, relatively, its probability; the results
    # are rounded once more to their own type, and out once inside the gradients.
    logit = 1e4 if hard is extreme else 10
    bound = 4 * logit * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps
    names = ("out", "dq", "dk", "dv")
    for name, actual, wanted in zip(names, (out, *grads), expected, strict=True):
        if name in ("dq", "dk"):  # differences of terms this large; exactly 0 where all keys are alike
            other = leaves[1] if name == "dq" else leaves[0]
            terms = math.prod(float(t.detach().double().norm()) for t in (other, grad_out, leaves[2]))
            assert float((actual.double() - wanted).norm()) <= bound * max(terms, 1e-30)
        elif float(wanted.norm()) == 0:
            assert not actual.any()
        else:
            assert relative_error(actual, wanted) < bound


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("attn_type", METHODS)
def test_bad_numbers_are_not_hidden(tmp_path, attn_type, which, bad):
    """A token attends itself, so what is wrong with it shows in its own row, or in the gradients."""
    named = dict(zip(("query", "key", "value", "grad_out"), tensors(torch.float32), strict=True))
    named[which][20, 0, 0, 3] = bad
    grad_out = named.pop("grad_out")
    leaves = [leaf.requires_grad_() for leaf in named.values()]
    out, _ = run(attn_type, tmp_path, leaves)
    grads = torch.autograd.grad(out, leaves, grad_out)
    assert not all(tensor.isfinite().all() for tensor in (out[20], *grads))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_rows_without_keys_are_zero(dtype):
    """A ring step in which rows, or all of them, attend nothing adds nothing to out and to gradients."""
    query, key, value, grad_out = tensors(dtype)
    blocks = TOKENS // BLOCK
    count = torch.zeros(1, HEADS, blocks, dtype=torch.int32)
    count[:, :, 1] = 1
    index = torch.zeros(1, HEADS, blocks, blocks, dtype=torch.int32)
    for counts, empty in ((torch.zeros_like(count), slice(0, TOKENS)), (count, slice(0, BLOCK))):
        tiles = Tiles(counts, index, False, BLOCK)
        out, lse = attend(query, key, value, tiles, 0.25)
        assert not out[empty].any() and (lse[..., empty] == -torch.inf).all()
        running, running_lse = out.clone(), lse.clone()
        merge(running, running_lse, out, lse)
        assert running.isfinite().all() and torch.equal(running[empty], out[empty])
        dq, *others = attend_backward(grad_out, query, key, value, out, lse, tiles, 0.25)
        assert not dq[empty].any() and all(tensor.isfinite().all() for tensor in others)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("bad", "word"), [(float("nan"), "NaN"), (-float("inf"), "Inf")])
def test_a_watch_keeps_what_it_saw(dtype, bad, word):
    watch = guards.Watch(7)
    for step in range(3):
        key = torch.ones(5, 3, dtype=dtype, requires_grad=True)
        value = torch.full((5, 3), bad if step == 1 else -2.0, dtype=dtype)
        watch.see(key=key * 1, value=value)
    assert watch.bad(gradients=False) == [f"value ({word})"]
    assert watch.bad(gradients=True) == []
    twice = key * 2
    watch.see(key=twice)
    (twice * bad).sum().backward()
    assert watch.bad(gradients=True) == [f"gradient of key ({word})"]
