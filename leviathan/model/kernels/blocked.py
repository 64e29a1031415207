"""The portable path of LEV's spline and product: torch operations over small blocks of ids.

A block is small enough for its factors `[d, n, r]` of one head to stay in the processor's cache,
and the buffers serve all blocks and heads. The dense product over all κ knots is used, although
three at most count: as one matrix product a dimension it takes 14 µs an id and pass on two cores
(d 128, h 8, κ 16, r 64), less than any gathering of spline rows that torch offers.
"""

import torch
from torch import Tensor

from leviathan.model.kernels.product import ProductTree
from leviathan.model.kernels.spline import Weights, slope, weights

BLOCK_ELEMENTS = 2**20  # factors of a block and head: 4 MiB of fp32


class BlockedModes:
    """M `[n, h, r]`, M_ℓ = Π_s φ_{ℓ,s}(σ(argument_ℓ,s)), for at most `block` ids a call.

    Args:
        delta: the splines' coefficients Δ `[h, d, κ, r]`, fp32 or float64.
        ids: how many ids there will be in all.
        gradient: whether `backward` will be called.
    """

    def __init__(self, delta: Tensor, ids: int, gradient: bool) -> None:
        h, d, knots, r = delta.shape
        self.block = min(ids, max(16, BLOCK_ELEMENTS // (d * r)))
        self._knots = knots
        self._coefficients = delta + 1
        self._bound = float(self._coefficients.abs().amax())  # φ is a mean of them
        # One more knot at either end takes the weights of knots that do not exist.
        self._basis = delta.new_zeros(d * self.block * (knots + 2))
        self._factors = delta.new_empty(d, self.block, r)
        self._tree = ProductTree(self._factors, gradient)
        self._places = torch.arange(d * self.block, device=delta.device) * (knots + 2)
        if gradient:
            self._centred = delta.transpose(2, 3)  # Σ_j dB_j = 0: the ones make no gradient
            self.grad_delta = torch.zeros_like(delta)

    def forward(self, argument: Tensor) -> Tensor:
        """`[n, h, d] → [n, h, r]`."""
        w = weights(_latent(argument), self._knots)
        places, values = self._entries(w)
        heads = [self._mode(head, places, values)[0] for head in range(len(places))]
        return torch.stack(heads, 1)

    def backward(self, argument: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The modes again, and the argument's gradient; `grad_delta` grows.

        Args:
            argument: `[n, h, d]`.
            grad: of the modes, `[n, h, r]`.
        """
        x = _latent(argument)
        w = weights(x, self._knots)
        places, values = self._entries(w)
        near = _neighbours(w.knot, self._knots)  # [h, 3, d, n]
        grad_near = torch.empty_like(values)
        heads = []
        for head in range(len(places)):
            mode, basis = self._mode(head, places, values)
            grad_factors = self._tree.spread(grad[:, head])
            self.grad_delta[head].baddbmm_(basis.transpose(1, 2), grad_factors)
            grad_basis = torch.bmm(grad_factors, self._centred[head])  # [d, n, κ]
            torch.take(grad_basis, near[head], out=grad_near[head])
            heads.append(mode)
        grad_x = slope(w, self._knots, grad_near)
        grad_x.mul_(x).mul_(1 - x)
        return torch.stack(heads, 1), grad_x.permute(2, 0, 1)

    def _entries(self, w: Weights) -> tuple[Tensor, Tensor]:
        """Where in the basis the three weights of each x go, and the weights: `[h, 3, d, n]`."""
        d, n = w.knot.shape[1:]
        first = w.knot + self._places[: d * n].view(d, n)
        return torch.stack([first, first + 1, first + 2], 1), w.raw / w.total

    def _mode(self, head: int, places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One head's product `[n, r]` and its basis `[d, n, κ]`."""
        d, n = places.shape[2:]
        flat = self._basis[: d * n * (self._knots + 2)].zero_()
        flat.scatter_(0, places[head].view(-1), values[head].view(-1))
        basis = flat.view(d, n, -1)[:, :, 1:-1]
        factors = self._factors[:, :n]
        torch.bmm(basis, self._coefficients[head], out=factors)
        return self._tree.multiply(factors, self._bound), basis


def _latent(argument: Tensor) -> Tensor:
    return argument.permute(1, 2, 0).sigmoid().contiguous()  # [h, d, n]


def _neighbours(knot: Tensor, knots: int) -> Tensor:
    """Flat places of the knots j-1, j, j+1 in a `[d, n, κ]`; of a missing one, that of j."""
    d, n = knot.shape[1:]
    rows = torch.arange(d * n, device=knot.device).view(d, n) * knots
    near = [(knot + step).clamp_(0, knots - 1).add_(rows) for step in (-1, 0, 1)]
    return torch.stack(near, 1)
