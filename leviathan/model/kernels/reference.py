"""Reference implementation of LEV: literal, step by step, with all intermediates.

Slow and large: 256 KB per id for the factors. For tests and benchmarks only.
Source: arXiv 2601.22040 v2, section on learned embedding vectorization.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from leviathan.model.kernels.lev import LAYER_NORM_EPS, Parameters, digits_of


def reference_vectors(ids: Tensor, p: Parameters, scale_inside: bool = False) -> Tensor:
    """E `[N, D]` of the ids `[N]`, in the dtype of the parameters; differentiable by autograd."""
    digits = digits_of(ids, p.codebooks.shape[1], p.codebooks.shape[0])  # [N, k]
    seed = torch.stack([p.codebooks[r][digits[:, r]] for r in range(digits.shape[1])]).sum(0)
    mixed = torch.einsum("ns,hts->nht", seed, p.latent_weight) + p.latent_bias  # [N, h, d]
    mixed = mixed * 0.5 if scale_inside else mixed
    normal = F.layer_norm(mixed, mixed.shape[-1:], eps=LAYER_NORM_EPS)
    normal = normal * p.norm_weight + p.norm_bias
    return vectors_of_argument(
        normal if scale_inside else normal * 0.5, p.spline_delta, p.out_weight
    )


def vectors_of_argument(argument: Tensor, delta: Tensor, out_weight: Tensor) -> Tensor:
    """E from the argument of the sigmoid `[N, h, d]`."""
    modes = reference_modes(argument, delta)
    return torch.einsum("nhr,hrm->nm", modes, out_weight)


def reference_modes(argument: Tensor, delta: Tensor) -> Tensor:
    """M `[N, h, r]` from the argument of the sigmoid `[N, h, d]` and Δ `[h, d, κ, r]`."""
    basis = spline_basis(torch.sigmoid(argument), delta.shape[2])  # [N, h, d, κ]
    factors = torch.einsum("nhsj,hsjr->nhsr", basis, 1 + delta)
    return factors.prod(2)


def spline_basis(x: Tensor, knots: int) -> Tensor:
    """Quadratic B-splines centered on `knots` uniform knots of [0, 1], summing to one.

    Args:
        x: any shape, values in [0, 1].
        knots: κ; knot j is at j/(κ-1).

    Returns:
        `[*x.shape, κ]`; at most three of the κ values are nonzero. The division by the sum matters
        only within half a knot spacing of a border, where a neighbor is missing.
    """
    centers = torch.arange(knots, device=x.device, dtype=x.dtype)
    u = (x.unsqueeze(-1) * (knots - 1) - centers).abs()
    inner = 0.75 - u * u
    outer = 0.5 * (1.5 - u).clamp(min=0).square()
    basis = torch.where(u < 0.5, inner, outer)
    return basis / basis.sum(-1, keepdim=True)
