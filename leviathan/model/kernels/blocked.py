"""Portable implementation of LEV's spline and product: torch operations over blocks of ids.

A block is small enough for its factors `[d, n, r]` of one head to fit into the cache, and the
buffers are reused for all blocks and heads. Values use that at most three of κ knots contribute:
they are embedding bags of three rows of Δ, 2.7 times as fast as the dense product over all knots
(`benchmarks/lev.py`). Gradients use the dense product: the sparse one of torch took 2.5 times as
long.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from leviathan.model.kernels.product import ProductTree
from leviathan.model.kernels.spline import slope, weights

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
        """Product of one head `[n, r]`, valid until the next call; knot `[d, n]`, values `[3, d,
        n]`."""
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
