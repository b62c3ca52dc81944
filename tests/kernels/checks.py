"""Compares a backend of a ring step with the naive reference in float64."""

import torch

from megatron_mtrain.kernels import reference

# Half a unit in the last place of 1. In 16 bits the probabilities and dS are rounded once before a product;
# the terms' errors have random signs, so that a sum keeps the relative error of a term, and dS = p (dP -
# delta) is a difference of two rounded numbers: 4 of them bound every result. float32 only accumulates: about
# the square root of the number of terms, of which no test has more than 32^2.
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
UNITS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 32}


def exact(step, scale):
    """out, lse, dq, dk and dv of a step in float64."""
    wide = [x.double() for x in step[:4]]
    out, lse = reference.attend(*wide[:3], step.tiles, scale)
    return out, lse, *reference.attend_backward(wide[3], *wide[:3], out, lse, step.tiles, scale)


def check_step(backend, step, scale=None, delta=False):
    """Asserts forward and gradients of `backend`; returns them. The backward gets the exact out and lse."""
    scale = step.query.shape[-1] ** -0.5 if scale is None else scale
    truth = exact(step, scale)
    out, lse = truth[0].float(), truth[1].float()
    row_delta = reference.row_delta(step.grad_out.float(), out) if delta else None
    made = backend.attend(step.query, step.key, step.value, step.tiles, scale)
    grads = backend.attend_backward(
        step.grad_out, step.query, step.key, step.value, out, lse, step.tiles, scale, delta=row_delta
    )
    bound = UNITS[step.query.dtype] * UNIT[step.query.dtype]
    for name, actual, wanted in zip(("out", "lse", "dq", "dk", "dv"), (*made, *grads), truth, strict=True):
        assert actual.dtype == torch.float32 and actual.shape == wanted.shape, name
        empty = wanted == -torch.inf
        assert torch.equal(actual == -torch.inf, empty), name
        error = (actual.double() - wanted)[~empty].norm() / wanted[~empty].norm().clamp(min=1e-30)
        assert error <= bound, f"{name}: relative error {error:.2e}, at most {bound:.2e}"
    return *made, *grads
