"""The product over the seed's dimensions, and its gradient, by multiplications alone.

Dividing the product by a factor, or summing logarithms, gives wrong gradients at and near zero
factors. Here factors are multiplied in a binary tree; going down it again, the gradient of a node
is its parent's times its sibling. Nothing is divided, so zeros are as exact as anything else.

Range: products of `2**level` factors are brought near 1 by powers of two, which round nothing, and
the powers come back at the end, so nothing overflows or underflows where the result does not.
Level 4 costs next to nothing and is safe for all but extreme factors, which are recognised; level
2 is safe for any four factors whose product fp32 can hold.
"""

import math

import torch
from torch import Tensor

FAST_LEVEL, SAFE_LEVEL = 4, 2
SMALLEST_EXPONENT = -126  # of normal fp32 numbers; float64 has more room and is held to the same


def tree_product(factors: Tensor) -> Tensor:
    """Product over the first dimension, `[s, …] → […]`. Differentiable through `ProductTree`."""
    return _TreeProduct.apply(factors)


class ProductTree:
    """One product over the first dimension of `[s, n, r]`, in buffers that are used again.

    Args:
        like: the factors' buffer; gives shape, dtype and device.
        gradient: whether `spread` will be called, which needs as much memory again.
    """

    def __init__(self, like: Tensor, gradient: bool) -> None:
        sizes = [like.shape[0]]
        while sizes[-1] > 1:
            sizes.append((sizes[-1] + 1) // 2)
        rest = like.shape[1:]
        self._levels = [like] + [like.new_empty(size, *rest) for size in sizes[1:]]
        self._grads = [like.new_empty(size, *rest) for size in sizes] if gradient else []
        self._scaled = 0
        self._exponent = self._total = like.new_empty(0)

    def multiply(self, factors: Tensor, bound: float) -> Tensor:
        """`[s, n, r] → [n, r]`; `bound` is an upper bound of the factors' magnitude."""
        self._levels = [factors] + [level[:, : factors.shape[1]] for level in self._levels[1:]]
        depth = len(self._levels) - 1
        fast, safe = min(FAST_LEVEL, depth), min(SAFE_LEVEL, depth)
        self._climb(0, fast)
        if fast > safe and not self._in_range(self._levels[fast], 2**fast, bound):
            fast = safe
            self._climb(0, safe)  # the level was scaled in place before, or has to be now
        self._scale(fast)
        self._climb(fast, depth)
        return _times_power(self._levels[-1][0], self._total)

    def spread(self, grad: Tensor) -> Tensor:
        """Gradients `[s, n, r]` of the factors last multiplied, given that of their product."""
        grads = [g[:, : grad.shape[0]] for g in self._grads]
        grads[-1][0] = grad
        for level in range(len(self._levels) - 1, 0, -1):
            if level == self._scaled:
                self._unscale(grads[level])
            _down(grads[level], self._levels[level - 1], grads[level - 1])
        if self._scaled == 0:
            self._unscale(grads[0])
        return grads[0]

    def _climb(self, start: int, stop: int) -> None:
        for below, above in zip(
            self._levels[start:stop], self._levels[start + 1 : stop + 1], strict=True
        ):
            half = below.shape[0] // 2
            torch.mul(below[:half], below[half : 2 * half], out=above[:half])
            if above.shape[0] > half:
                above[half] = below[-1]

    def _in_range(self, nodes: Tensor, count: int, bound: float) -> bool:
        """Whether no partial product of a node's `count` factors can have left fp32's range.

        Any of them is at least the node over `bound ** (count - 1)`. A node that is zero may be
        an exact zero or an underflow; the safe level tells.
        """
        growth = math.log2(max(bound, 1.0))
        lowest = SMALLEST_EXPONENT + (count - 1) * growth
        if not (count * growth < -SMALLEST_EXPONENT and lowest < 0):
            return False
        return bool(nodes.abs().amin() >= 2.0**lowest)

    def _scale(self, level: int) -> None:
        """Brings the nodes of a level to magnitudes in [√½, √2]."""
        nodes = self._levels[level]
        magnitude = nodes.abs()
        magnitude.masked_fill_(magnitude == 0, 1)
        exponent = magnitude.log2_().round_().clamp_(SMALLEST_EXPONENT, -SMALLEST_EXPONENT)
        self._scaled, self._exponent, self._total = level, exponent, exponent.sum(0)
        if level == 0:  # the factors belong to the caller
            self._levels[0] = nodes * torch.exp2(-exponent)
        else:
            nodes.mul_(torch.exp2(-exponent))

    def _unscale(self, grads: Tensor) -> None:
        """d product / d node: all powers of two but the node's own come back."""
        grads.copy_(_times_power(grads, self._total - self._exponent))


def _times_power(x: Tensor, exponent: Tensor) -> Tensor:
    """x·2^exponent in two steps, as one power alone may be out of range."""
    half = (exponent / 2).round_()
    return (x * torch.exp2(half)).mul_(torch.exp2(exponent - half))


def _down(grads: Tensor, below: Tensor, out: Tensor) -> None:
    half = below.shape[0] // 2
    torch.mul(grads[:half], below[half : 2 * half], out=out[:half])
    torch.mul(grads[:half], below[:half], out=out[half : 2 * half])
    if grads.shape[0] > half:
        out[-1] = grads[half]


class _TreeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return _whole(factors, gradient=False)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (factors,) = ctx.saved_tensors
        _, tree = _whole(factors, gradient=True)
        return tree.spread(grad.reshape(1, -1)).view_as(factors)


def _whole(factors: Tensor, gradient: bool) -> tuple[Tensor, ProductTree]:
    flat = factors.reshape(factors.shape[0], 1, -1)
    tree = ProductTree(flat, gradient)
    return tree.multiply(flat, float(flat.abs().amax())).view(factors.shape[1:]), tree
