"""Portable implementation of LEV's spline and product: torch operations over blocks of ids.

A block is small enough for its factors `[d, n, r]` of one head to fit into the cache, and the
buffers are reused for all blocks and heads. Values use that at most three of κ knots contribute:
they are embedding bags of three rows of Δ, 2.7 times as fast as the dense product over all knots
(`benchmarks/lev.py`). Gradients use the dense product: the sparse one of torch took 2.5 times as
long.
"""

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

# ---------------------------------------------------------------- workers
# The operations of a block are small. Parallelized individually, they would synchronize thousands
# of times per step; each slice synchronizes once.

Result = TypeVar("Result")

MAX_WORKERS = 8  # with more workers, Python's GIL would dominate; each then uses several cores
MIN_ITEMS_PER_WORKER = 32  # minimum number of items per worker


def in_parallel(work: Callable[[slice], Result], count: int) -> list[Result]:
    """Runs `work` on consecutive slices of `range(count)`, without gradient.

    The slices depend only on the count and on `torch.get_num_threads()`. No thread outlives the
    call.
    """
    threads = torch.get_num_threads()
    workers = max(1, min(threads, MAX_WORKERS, count // MIN_ITEMS_PER_WORKER))
    bounds = [count * number // workers for number in range(workers + 1)]
    slices = [slice(*pair) for pair in itertools.pairwise(bounds)]
    if workers == 1:
        return [_without_gradient(work, slices[0])]

    def start() -> None:
        torch.set_num_threads(threads // workers)

    with ThreadPoolExecutor(workers - 1, "leviathan", start) as pool:
        futures = [pool.submit(_without_gradient, work, part) for part in slices[1:]]
        try:
            torch.set_num_threads(threads // workers)
            first = _without_gradient(work, slices[0])
            return [first, *(future.result() for future in futures)]
        finally:
            # The setting is per thread, but also the default of threads that start later.
            torch.set_num_threads(threads)


@torch.no_grad()
def _without_gradient(work: Callable[[slice], Result], part: slice) -> Result:
    return work(part)


# ---------------------------------------------------------------- product
# Dividing the product by a factor, or summing logarithms, gives wrong gradients at and near zero
# factors. Factors are therefore multiplied in a binary tree; going down the tree, the gradient of a
# node is that of its parent times its sibling. Nothing is divided, so zeros are exact.
#
# Range: products of `2**level` factors are scaled to near 1 by powers of two, which is exact, and
# the scale is undone at the end, so that intermediate results do not overflow or underflow unless
# the result does. Level 4 has a negligible cost and is safe except for extreme factors. If such
# factors are detected, every factor is scaled to near 1 separately (level 0).

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


# ---------------------------------------------------------------- spline
# With t = x·(κ-1), j the nearest knot and f = t - j ∈ [-½, ½] only the knots j-1, j, j+1
# contribute, with weights ½(½-f)², ¾-f², ½(½+f)², which sum to one; at a border one knot is
# missing, and the other weights are divided by their sum. Source: arXiv 2601.22040 v2, the basis of
# LEV's spline.


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


# ---------------------------------------------------------------- blocks

CACHED_ELEMENTS = 2**20  # factors of a block and head: 4 MiB of fp32
DEVICE_ELEMENTS = 2**24  # for devices, where launches cost more than cache misses


class BlockedModes:
    """M `[n, h, r]`, M_ℓ = Π_s φ_{ℓ,s}(σ(argument_ℓ,s)), for at most `block` ids per call.

    Args:
        delta: coefficients Δ of the splines `[h, d, κ, r]`, fp32 or float64.
        ids: total number of ids.
        gradient: whether `backward` will be called.
    """

    def __init__(self, delta: Tensor, ids: int, gradient: bool) -> None:
        _, d, knots, r = delta.shape
        elements = CACHED_ELEMENTS if delta.device.type == "cpu" else DEVICE_ELEMENTS
        self.block = min(ids, max(16, elements // (d * r)))
        coefficients = delta + 1
        self._bound = float(coefficients.abs().amax())  # φ is a mean over them
        # One additional knot at each end has weight zero.
        self._table = F.pad(coefficients, (0, 0, 1, 1)).flatten(1, 2)  # [h, d·(κ+2), r]
        self._shape, self._gradient = (d, knots, r), gradient
        self._ids = -1
        if gradient:
            self._centered = delta.transpose(
                2, 3
            )  # Σ_j dB_j = 0: the constant 1 contributes no gradient
            self.grad_delta = torch.zeros_like(delta)

    def forward(self, argument: Tensor) -> Tensor:
        """`[n, h, d] → [n, h, r]`."""
        self._fit(len(argument))
        w = weights(_latent(argument), self._shape[1])
        modes = argument.new_empty(*argument.shape[:2], self._shape[2])
        for head in range(modes.shape[1]):
            modes[:, head] = self._mode(head, w.knot[head], w.values[head])
        return modes

    def backward(self, argument: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Recomputes the modes and returns the gradient of the argument; adds to `grad_delta`.

        Args:
            argument: `[n, h, d]`.
            grad: gradient of the modes, `[n, h, r]`.
        """
        self._fit(len(argument))
        d, knots, _ = self._shape
        x = _latent(argument)
        w = weights(x, knots)
        grad_near = torch.empty_like(w.values)  # of the basis at the knots j-1, j, j+1
        modes = torch.empty_like(grad)
        rows = torch.arange(d * len(argument), device=x.device).view(d, -1) * knots
        for head in range(modes.shape[1]):
            modes[:, head] = self._mode(head, w.knot[head], w.values[head])
            grad_factors = self._tree.backward(grad[:, head])
            self._spread_basis(w.knot[head], w.values[head])
            self.grad_delta[head].baddbmm_(self._basis.transpose(1, 2), grad_factors)
            grad_basis = torch.bmm(grad_factors, self._centered[head])  # [d, n, κ]
            for side, near in enumerate(_neighbors(w.knot[head], knots)):
                torch.take(grad_basis, near.add_(rows), out=grad_near[head, side])
        grad_x = slope(w, knots, grad_near)
        grad_x.mul_(x).mul_(1 - x)
        return modes, grad_x.permute(2, 0, 1)

    def _fit(self, n: int) -> None:
        """Buffers for blocks of n ids."""
        if n == self._ids:
            return
        self._ids = n
        d, knots, r = self._shape
        where = self._table.device
        self._spline = torch.arange(d, device=where).view(d, 1) * (knots + 2)
        self._sides = torch.arange(3, device=where)
        self._bags = torch.arange(0, 3 * d * n + 1, 3, device=where)
        self._tree = ProductTree((d, n, r), self._table, self._gradient)
        if self._gradient:
            self._padded = self._table.new_empty(d * n * (knots + 2))
            self._basis = self._padded.view(d, n, knots + 2)[:, :, 1:-1]  # [d, n, κ]
            self._rows = torch.arange(d * n, device=where).view(d, n) * (knots + 2)

    def _mode(self, head: int, knot: Tensor, values: Tensor) -> Tensor:
        """Product of one head `[n, r]`, valid until the next call; knot `[d, n]`."""
        self._tree.release()
        first = knot + self._spline
        factors = F.embedding_bag(
            (first.unsqueeze(-1) + self._sides).view(-1),
            self._table[head],
            self._bags,
            mode="sum",
            per_sample_weights=values.permute(1, 2, 0).reshape(-1),
            include_last_offset=True,
        )
        return self._tree.multiply(factors.view(*knot.shape, -1), self._bound)

    def _spread_basis(self, knot: Tensor, values: Tensor) -> None:
        """Fills the dense basis of one head."""
        first = knot + self._rows
        places = torch.stack([first, first + 1, first + 2])
        self._padded.zero_().scatter_(0, places.view(-1), values.view(-1))


def _latent(argument: Tensor) -> Tensor:
    return argument.permute(1, 2, 0).sigmoid().contiguous()  # [h, d, n]


def _neighbors(knot: Tensor, knots: int) -> list[Tensor]:
    """The knots j-1, j, j+1; a missing knot, whose weight is zero, is replaced by j."""
    return [(knot + step).clamp_(0, knots - 1) for step in (-1, 0, 1)]
