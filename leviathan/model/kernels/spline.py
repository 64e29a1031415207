"""Quadratic B-splines on uniform knots of [0, 1]: three weights, where they stand, their slopes.

With t = x·(κ-1), j the nearest knot and f = t - j ∈ [-½, ½] only the knots j-1, j, j+1 count, with
weights ½(½-f)², ¾-f², ½(½+f)², which sum to one; at a border one knot is missing, and the others
are divided by their sum. Source: arXiv 2601.22040 v2, the basis of LEV's spline.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """Where each x `[h, d, n]` stands among the knots."""

    knot: Tensor  # [h, d, n] int64: the nearest
    offset: Tensor  # [h, d, n]: f
    raw: Tensor  # [h, 3, d, n]: weights of the knots j-1, j, j+1; zero for a missing one
    total: Tensor  # [h, 1, d, n]: their sum


def weights(x: Tensor, knots: int) -> Weights:
    """The weights at x `[h, d, n]` in [0, 1]; κ = `knots`."""
    t = x * (knots - 1)
    nearest = t.round()
    offset = t.sub_(nearest)
    raw = x.new_empty(x.shape[0], 3, *x.shape[1:])
    torch.mul((0.5 - offset).square_(), 0.5, out=raw[:, 0])
    torch.sub(0.75, offset.square(), out=raw[:, 1])
    torch.mul((0.5 + offset).square_(), 0.5, out=raw[:, 2])
    raw[:, 0].mul_(nearest != 0)
    raw[:, 2].mul_(nearest != knots - 1)
    return Weights(nearest.long(), offset, raw, raw.sum(1, keepdim=True))


def slope(w: Weights, knots: int, grad: Tensor) -> Tensor:
    """dL/dx `[h, d, n]`, given dL/d basis at the knots j-1, j, j+1: `[h, 3, d, n]`."""
    left = (w.offset - 0.5).mul_(w.knot != 0)
    middle = -2 * w.offset
    right = (w.offset + 0.5).mul_(w.knot != knots - 1)
    change = left + middle + right  # of the sum: not zero at the borders only
    total = w.total[:, 0]
    mean = (grad * w.raw).sum(1).div_(total)
    along = grad[:, 0] * left + grad[:, 1] * middle + grad[:, 2] * right
    return along.addcmul_(mean, change, value=-1).div_(total).mul_(knots - 1)
