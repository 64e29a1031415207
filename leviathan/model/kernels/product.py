"""Product over the dimensions of the seed, and its gradient, by multiplications only.

Dividing the product by a factor, or summing logarithms, gives wrong gradients at and near zero
factors. Factors are therefore multiplied in a binary tree; going down the tree, the gradient of a
node is that of its parent times its sibling. Nothing is divided, so zeros are exact.

Range: products of `2**level` factors are scaled to near 1 by powers of two, which is exact, and the
scale is undone at the end, so that intermediate results do not overflow or underflow unless the
result does. Level 4 has a negligible cost and is safe except for extreme factors. If such factors
are detected, every factor is scaled to near 1 separately (level 0).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

FAST_LEVEL = 4
SMALLEST_EXPONENT = -126  # of normal fp32 numbers; also applied to float64


class _Level(NamedTuple):
    """One level of the tree, as the views that both directions need."""

    halves: tuple[Tensor, Tensor]  # the nodes: two of [m // 2, n, r]
    products: Tensor  # [m // 2, n, r], their products in the next level
    grad_halves: tuple[Tensor, Tensor] | None
    grad_products: Tensor | None
    odd: tuple[
        Tensor, ...
    ]  # an odd last node, its position in the next level, and those of its gradient


class ProductTree:
    """A product over the first dimension of `[s, n, r]`, in reused buffers.

    Args:
        shape: `(s, n, r)`.
        like: a tensor with the dtype and device of the factors.
        gradient: whether `spread` will be called, which doubles the memory.
    """

    def __init__(self, shape: tuple[int, int, int], like: Tensor, gradient: bool) -> None:
        sizes = [shape[0]]
        while sizes[-1] > 1:
            sizes.append((sizes[-1] + 1) // 2)
        self._nothing = like.new_empty(0, *shape[1:])
        self._nodes = [self._nothing] + [like.new_empty(size, *shape[1:]) for size in sizes[1:]]
        self._grads = [like.new_empty(size, *shape[1:]) for size in sizes] if gradient else []
        self._levels = [self._level(number) for number in range(len(sizes) - 1)]
        self._scaled: int | None = None  # the level that is scaled to near 1
        self._exponent = self._total = self._nothing  # its powers of two, and that of the product

    def release(self) -> None:
        """Releases the last factors, so that the next ones may use their memory."""
        self._take(self._nothing)

    def multiply(self, factors: Tensor, bound: float) -> Tensor:
        """`[n, r]`, valid until the next call; `bound` is an upper bound of the factors' magnitude.

        The factors `[s, n, r]` are kept for `spread`, and may be overwritten.
        """
        depth = len(self._levels)
        self._take(factors)
        level = min(FAST_LEVEL, depth)
        self._leap(level)
        magnitude = self._nodes[level].abs()
        low, high = (float(x) for x in magnitude.aminmax())
        if not low >= _lowest(2**level, bound):  # also if a factor is NaN
            level, low = 0, 0.0
            magnitude = factors.abs()
        # No product of nodes this near to 1 can overflow or underflow.
        calm = 2.0 ** (-SMALLEST_EXPONENT / len(magnitude))
        self._scaled = None if 1 / calm <= low and high <= calm else level
        if self._scaled is not None:
            self._scale(level, magnitude)
        self._climb(level, depth)
        product = self._nodes[-1][0]
        return product if self._scaled is None else _times_power(product, self._total)

    def backward(self, grad: Tensor) -> Tensor:
        """Gradients `[s, n, r]` of the last factors, given that of their product."""
        self._grads[-1][0] = grad
        for number in range(len(self._levels), -1, -1):
            if number == self._scaled:  # undo all powers of two except that of the node
                grads = self._grads[number]
                grads.copy_(_times_power(grads, self._total - self._exponent))
            if number > 0:
                _down(self._levels[number - 1])
        return self._grads[0]

    def _take(self, factors: Tensor) -> None:
        self._nodes[0] = factors
        if self._levels:
            self._levels[0] = self._level(0)

    def _level(self, number: int) -> _Level:
        grads = self._grads[number : number + 2]
        return _level(self._nodes[number], self._nodes[number + 1], *grads)

    def _leap(self, stop: int) -> None:
        """Like `_climb` from the factors; without gradient, in a single pass."""
        factors = self._nodes[0]
        if self._grads or stop == 0 or factors.shape[0] % 2**stop:
            self._climb(0, stop)
        else:
            parts = factors.view(2**stop, -1, *factors.shape[1:])
            torch.prod(parts, 0, out=self._nodes[stop])

    def _climb(self, start: int, stop: int) -> None:
        for level in self._levels[start:stop]:
            torch.mul(*level.halves, out=level.products)
            if level.odd:
                level.odd[1].copy_(level.odd[0])

    def _scale(self, number: int, magnitude: Tensor) -> None:
        """Scales the nodes of a level to magnitudes in [√½, √2]; overwrites `magnitude`."""
        magnitude.masked_fill_(magnitude == 0, 1)
        exponent = magnitude.log2_().round_().clamp_(SMALLEST_EXPONENT, -SMALLEST_EXPONENT)
        self._exponent, self._total = exponent, exponent.sum(0)
        self._nodes[number].mul_(torch.exp2(-exponent))


def _level(
    nodes: Tensor, above: Tensor, grads: Tensor | None = None, grads_above: Tensor | None = None
) -> _Level:
    half = nodes.shape[0] // 2
    odd = (nodes[-1], above[-1]) if nodes.shape[0] % 2 else ()
    if grads is None or grads_above is None:
        return _Level(_halves(nodes), above[:half], None, None, odd)
    if odd:
        odd = (*odd, grads[-1], grads_above[-1])
    return _Level(_halves(nodes), above[:half], _halves(grads), grads_above[:half], odd)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[0] // 2
    return x[:half], x[half : 2 * half]


def _down(level: _Level) -> None:
    assert level.grad_halves is not None, "the tree was created without gradients"
    assert level.grad_products is not None
    for mine, sibling in zip(level.grad_halves, reversed(level.halves), strict=True):
        torch.mul(level.grad_products, sibling, out=mine)
    if level.odd:
        level.odd[2].copy_(level.odd[3])


def _lowest(count: int, bound: float) -> float:
    """Smallest node of `count` factors such that no partial product can have underflowed.

    Each of them is at least the node over `bound ** (count - 1)`. Infinite if one may have
    overflowed; always positive, because a zero node may be an exact zero or an underflow.
    """
    growth = math.log2(max(bound, 1.0))
    if not count * growth < -SMALLEST_EXPONENT:
        return math.inf
    return 2.0 ** (SMALLEST_EXPONENT + (count - 1) * growth)


def _times_power(x: Tensor, exponent: Tensor) -> Tensor:
    """x·2^exponent in two steps, because one power may be out of range.

    Exponents are clamped to the useful range: an infinite power times zero would be NaN.
    """
    most = 2.0 * (math.frexp(torch.finfo(x.dtype).max)[1] - 2)
    exponent = exponent.clamp(-most, most)
    half = (exponent / 2).round_()
    return (x * torch.exp2(half)).mul_(torch.exp2(exponent - half))
