"""sparse_ring_attention on a single rank: precision, misuse, and what the index promises."""

import pytest
import torch

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention
from tests.oracle import dense_mask, naive_attention, relative_error
from tests.ring.cases import write_pattern


def tensors(tokens=64, batch=2, heads=4, groups=2, size=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(tokens, batch, h, size, generator=generator).to(dtype) for h in (heads, groups, groups)
    ]


DENSE = AttentionConfig.from_dict("dense", {"block_size": 8})
LAYOUT = make_layout("stripe", 64, 1, 8)


def test_float64_is_exact():
    leaves = [tensor.requires_grad_() for tensor in tensors(dtype=torch.float64)]
    grad_out = torch.randn(64, 2, 4, 8, dtype=torch.float64)
    out = sparse_ring_attention(*leaves, config=DENSE, layout=LAYOUT, rings=[])
    grads = torch.autograd.grad(out, leaves, grad_out)
    expected = naive_attention(*leaves, dense_mask(2, 4, 64), grad_out)
    assert max(relative_error(a, e) for a, e in zip((out, *grads), expected, strict=True)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_dtype_and_loses_only_the_last_rounding(dtype):
    leaves = [tensor.requires_grad_() for tensor in tensors(dtype=dtype)]
    grad_out = torch.randn(64, 2, 4, 8).to(dtype)
    out = sparse_ring_attention(*leaves, config=DENSE, layout=LAYOUT, rings=[])
    grads = torch.autograd.grad(out, leaves, grad_out)
    expected = naive_attention(*leaves, dense_mask(2, 4, 64), grad_out)
    for actual, wanted in zip((out, *grads), expected, strict=True):
        assert actual.dtype == dtype
        # Inputs are exact in both; one rounding of the result, and of out inside delta.
        assert relative_error(actual, wanted) < 2 * torch.finfo(dtype).eps


def test_strided_inputs_and_no_grad():
    query, key, value = tensors()
    packed = torch.cat([key, value], -1)
    with torch.no_grad():
        plain = sparse_ring_attention(query, key, value, config=DENSE, layout=LAYOUT, rings=[])
        strided = sparse_ring_attention(
            query.transpose(0, 1).contiguous().transpose(0, 1),
            packed[..., :8],
            packed[..., 8:],
            config=DENSE,
            layout=LAYOUT,
            rings=[],
        )
    assert torch.equal(plain, strided)


def test_two_runs_are_bitwise_equal(tmp_path):
    pattern = write_pattern(tmp_path / "p.json", [[["flex_vertical_and_slash", [0.5, 9], [0.5, 9], 1]] * 4])
    config = AttentionConfig.from_dict(
        "minfer",
        {"pattern_config_name": pattern, "block_size": 8, "last_q": 8, "sink_tokens": 1, "local_window": 3},
    )

    def run():
        leaves = [tensor.requires_grad_() for tensor in tensors()]
        out, index = sparse_ring_attention(*leaves, config=config, layout=LAYOUT, rings=[], return_index=True)
        return [out, index.dense_mask(), *torch.autograd.grad(out.square().sum(), leaves)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_minfer_refuses_what_its_pattern_has_no_budget_for():
    config = AttentionConfig.from_dict(
        "minfer", {"pattern_config_name": "Qwen2.5_3B_flex_0.90", "block_size": 8}
    )
    with pytest.raises(ValueError, match="36 layers of 16 heads; layer 36"):
        sparse_ring_attention(*tensors(), config=config, layout=LAYOUT, rings=[], layer=36)
    with pytest.raises(ValueError, match=r"heads 14 \.\. 17 were asked for"):
        sparse_ring_attention(*tensors(), config=config.with_heads(14), layout=LAYOUT, rings=[])


def refuse(message, query, key, value, layout=LAYOUT):
    with pytest.raises(ValueError, match=message):
        sparse_ring_attention(query, key, value, config=DENSE, layout=layout, rings=[])


def test_refuses_shapes():
    query, key, value = tensors()
    refuse("must be .s, b, heads, d.", query[0], key, value)
    refuse("must be .s, b, heads, d.", query, key, value[:32])
    refuse("differ in tokens, batch or head size", query, key[..., :4], value[..., :4])
    refuse("4 query heads are not a multiple of 3 key heads", query, *tensors(groups=3)[1:])
    refuse("give them one dtype", query, key.half(), value.half())
    refuse("the rings have 1 ranks; the layout is for 2", query, key, value, make_layout("stripe", 64, 2, 8))
    refuse(
        "shard has 64 tokens; the layout .* gives 128", query, key, value, make_layout("stripe", 128, 1, 8)
    )


def test_refuses_a_backend_that_cannot_run():
    query, key, value = tensors()
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    config = AttentionConfig.from_dict("dense", {"block_size": 8, "backend": "triton"})
    with pytest.raises(ValueError, match="backend 'triton' needs tensors on a GPU|Triton kernels take"):
        sparse_ring_attention(query, key, value, config=config, layout=LAYOUT, rings=[])
