"""Quadratic B-splines on uniform knots of [0, 1]: three weights, their knots and derivatives.

With t = x·(κ-1), j the nearest knot and f = t - j ∈ [-½, ½] only the knots j-1, j, j+1 contribute,
with weights ½(½-f)², ¾-f², ½(½+f)², which sum to one; at a border one knot is missing, and the
other weights are divided by their sum. Source: arXiv 2601.22040 v2, the basis of LEV's spline.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """Position of each x `[h, d, n]` among the knots."""

    knot: Tensor  # [h, d, n] int64: the nearest knot
    offset: Tensor  # [h, d, n]: f
    values: Tensor  # [h, 3, d, n]: weights of the knots j-1, j, j+1; zero for a missing one
    total: Tensor | None  # [h, d, n]: sum of the weights; None if no x is at a border


def weights(x: Tensor, knots: int) -> Weights:
    """Weights at x `[h, d, n]` in [0, 1]; κ = `knots`. For NaN: NaN weights at knot 0."""
    t = x * (knots - 1)
    nearest = t.round()
    offset = t.sub_(nearest)
    values = x.new_empty(x.shape[0], 3, *x.shape[1:])
    left, middle, right = values.unbind(1)
    torch.mul((0.5 - offset).square_(), 0.5, out=left)
    torch.sub(0.75, offset.square(), out=middle)
    torch.mul((0.5 + offset).square_(), 0.5, out=right)
    total = None
    low, high = (float(border) for border in nearest.aminmax()) if x.numel() else (1, 0)
    if not (low > 0 and high < knots - 1):  # also if an x is NaN: then low and high are NaN
        first, last = nearest == 0, nearest == knots - 1
        total = 1 - left * first - right * last  # exactly 1 elsewhere
        left.masked_fill_(first, 0)
        right.masked_fill_(last, 0)
        values /= total.unsqueeze(1)
    # Converting NaN to an integer would give an index outside the table.
    return Weights(nearest.nan_to_num_(nan=0.0).long(), offset, values, total)


def slope(w: Weights, knots: int, grad: Tensor) -> Tensor:
    """dL/dx `[h, d, n]`, given dL/d basis at the knots j-1, j, j+1: `[h, 3, d, n]`."""
    left, middle, right = w.offset - 0.5, -2 * w.offset, w.offset + 0.5
    if w.total is not None:
        left.masked_fill_(w.knot == 0, 0)
        right.masked_fill_(w.knot == knots - 1, 0)
    along = (grad[:, 0] * left).addcmul_(grad[:, 1], middle).addcmul_(grad[:, 2], right)
    if w.total is not None:
        change = left + middle + right  # derivative of the sum: zero except at the borders
        mean = (grad * w.values).sum(1)
        along.addcmul_(mean, change, value=-1).div_(w.total)
    return along.mul_(knots - 1)
