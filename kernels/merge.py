"""Joins the softmax of one set of keys with that of another, disjoint set: the running result of a ring.

Reference: the log-sum-exp form of online softmax (Milakov and Gimelshein, arXiv 1805.02867).
"""

import torch


def merge(out, lse, step_out, step_lse) -> None:
    """Adds a ring step to the running result, in place.

    out, step_out [s, b, h, d] and lse, step_lse [b, h, s] (natural logarithm, -inf: no key yet), all float32
    or float64. The weights are sigmoids of the difference, which cannot overflow; two empty sides stay empty.
    """
    difference = torch.where(step_lse == -torch.inf, -torch.inf, step_lse - lse)
    weight = torch.sigmoid(difference).permute(2, 0, 1)[..., None]
    out.lerp_(step_out, weight)
    lse.copy_(torch.logaddexp(lse, step_lse))
