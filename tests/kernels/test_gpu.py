"""The compiled kernels at real shapes, in bfloat16, against float64 and beside torch's SDPA with the same
mask.

Run with `pytest -m gpu tests/kernels`; plain `pytest tests/kernels` on a GPU runs the interpreter's tests
there.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron_mtrain.kernels import reference
from megatron_mtrain.kernels.tiles import Routes, Tiles

from .checks import exact
from .conftest import Step

triton_backend = pytest.importorskip("megatron_mtrain.kernels.triton_backend", reason="needs Triton")
pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def ours(step, scale):
    out, lse = triton_backend.attend(step.query, step.key, step.value, step.tiles, scale)
    inputs = step.query, step.key, step.value, out, lse
    return out, *triton_backend.attend_backward(step.grad_out, *inputs, step.tiles, scale)


def sdpa(step, mask, scale):
    leaves = [x.detach().clone().requires_grad_() for x in (step.query, step.key, step.value)]
    group = step.query.shape[2] // step.key.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, leaves, step.grad_out)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (7, 1), (16, 2)], ids=["gqa1", "gqa4", "gqa7", "gqa8"])
@pytest.mark.parametrize("columns", [None, (256, 100, 0)], ids=["tiles", "columns"])
@pytest.mark.parametrize("batch", [1, 2], ids=["batch1", "batch2"])
def test_error_at_most_half_more_than_sdpa(draw, heads, head_dim, columns, batch):
    step = draw(heads, (16, 16), 128, head_dim, BF16, batch=batch, columns=columns)
    # SDPA has no empty rows: every query block sees its own block.
    index, count = step.tiles.block_index, step.tiles.block_count
    own = torch.arange(16, dtype=torch.int32, device="cuda")
    without = (index.gather(-1, (count - 1).clamp(min=0).long()[..., None])[..., 0] != own) | (count == 0)
    index.scatter_(-1, count.clamp(max=15).long()[..., None], torch.where(without, own, 2**30)[..., None])
    count += without.int()
    step = step._replace(tiles=step.tiles._replace(block_count=count, block_index=index))
    scale = head_dim**-0.5
    mask = reference.token_mask(step.tiles, slice(0, 16), reference.block_mask(step.tiles, 16))
    truth = exact(step, scale)
    names, wanted = ("out", "dq", "dk", "dv"), (truth[0], *truth[2:])
    first, second = ours(step, scale), ours(step, scale)
    for name, made, again, plain, right in zip(
        names, first, second, sdpa(step, mask, scale), wanted, strict=True
    ):
        assert torch.equal(made, again), f"two runs differ in {name}"
        errors = [float((x.double() - right).norm() / right.norm()) for x in (made, plain)]
        assert errors[0] <= 1.5 * errors[1], (name, errors)


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("columns", [None, (256, 100, 0)], ids=["tiles", "columns"])
def test_a_step_off_the_diagonal(draw, block_size, columns):
    step = draw((4, 2), (12, 10), block_size, 128, BF16, diagonal=False, columns=columns)
    truth = exact(step, 0.1)
    made = triton_backend.attend(step.query, step.key, step.value, step.tiles, 0.1)
    inputs = step.query, step.key, step.value, truth[0].float(), truth[1].float()
    made += triton_backend.attend_backward(step.grad_out, *inputs, step.tiles, 0.1)
    for actual, wanted in zip(made, truth, strict=True):
        seen = wanted != -torch.inf
        assert torch.equal(actual != -torch.inf, seen)
        # Four half units of bfloat16: see checks.py.
        assert (actual.double() - wanted)[seen].norm() <= 4 * 2.0**-8 * wanted[seen].norm()


def test_more_than_2_31_elements():
    """The last tokens of tensors that pass 2^31 elements; they attend their own and the previous block."""
    tokens, batch, heads, near = 131072, 9, 16, 4
    m = tokens // 128
    generator = torch.Generator("cuda").manual_seed(5)

    def draw_tensor(count):
        shape = (tokens, batch, count, 128)
        return torch.empty(shape, dtype=BF16, device="cuda").normal_(generator=generator)

    query, grad_out, key, value = draw_tensor(heads), draw_tensor(heads), draw_tensor(2), draw_tensor(2)
    assert query.numel() > 2**31

    def band(blocks):
        rows = torch.arange(blocks, dtype=torch.int32, device="cuda")
        index = torch.stack(((rows - 1).clamp(min=0), rows), -1)
        index[0, 1] = 0
        lists = torch.zeros(batch, heads, blocks, blocks, dtype=torch.int32, device="cuda")
        lists[..., :2] = index
        count = (rows > 0).int() + 1
        return Tiles(count.expand(batch, heads, -1).contiguous(), lists, True, 128)

    tiles = triton_backend.with_key_lists(band(m), key)
    out, lse = triton_backend.attend(query, key, value, tiles, 0.1)
    grads = triton_backend.attend_backward(grad_out, query, key, value, out, lse, tiles, 0.1)
    tail = [x[-near * 128 :].double() for x in (query, key, value, grad_out)]
    right, right_lse = reference.attend(*tail[:3], band(near), 0.1)
    right_grads = reference.attend_backward(tail[3], *tail[:3], right, right_lse, band(near), 0.1)
    # The first block of the tail misses its previous block: its rows differ, and the keys its rows would have
    # seen.
    for made, wanted in zip((out, *grads), (right, *right_grads), strict=True):
        error = (made[-2 * 128 :].double() - wanted[-2 * 128 :]).norm() / wanted[-2 * 128 :].norm()
        assert error <= 4 * 2.0**-8


def test_more_than_2_31_routes():
    """The lists of all heads pass 2^31 entries; what follows a list's few rows is undefined.

    Every row of the second block is sent to the first: the same as if it listed it.
    """
    heads, entries = 9, 2**28

    def draw_tensor():
        return torch.randn(256, 1, heads, 64, device="cuda").to(BF16)

    def lists(*rows):
        index = torch.tensor(rows, dtype=torch.int32, device="cuda")
        return index.expand(1, heads, *index.shape).contiguous()

    sent = torch.empty(1, heads, entries, dtype=torch.int32, device="cuda")
    sent[..., :128] = torch.arange(128, 256, dtype=torch.int32, device="cuda")
    routes = Routes(lists(0, 128, 256)[0, 0].contiguous(), lists(0, 128, 128), sent)
    routed = Tiles(lists(1, 1), lists([0], [1]), True, 128, routes=routes)
    tensors = [draw_tensor() for _ in range(4)]
    truth = exact(Step(*tensors, Tiles(lists(1, 2), lists([0, 0], [0, 1]), True, 128)), 0.1)
    query, key, value, grad_out = tensors
    made = triton_backend.attend(query, key, value, routed, 0.1)
    rows = truth[0].float(), truth[1].float()
    made += triton_backend.attend_backward(grad_out, query, key, value, *rows, routed, 0.1)
    for actual, wanted in zip(made, truth, strict=True):
        assert (actual.double() - wanted).norm() <= 4 * 2.0**-8 * wanted.norm()
