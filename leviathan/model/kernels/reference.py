"""LEV as the paper writes it, step by step, with every intermediate kept: what the rest must equal.

Slow and large: 256 KB an id for the factors alone. For tests and benchmarks only.
Source: arXiv 2601.22040 v2, section on learned embedding vectorisation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from leviathan.model.kernels.lev import LAYER_NORM_EPS, Parameters, digits_of


def reference_vectors(ids: Tensor, p: Parameters, scale_inside: bool = False) -> Tensor:
    """E `[N, D]` of the ids `[N]`; differentiable by autograd, in the parameters' dtype."""
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
    """From the sigmoid's argument `[N, h, d]` on."""
    modes = reference_modes(argument, delta)
    return torch.einsum("nhr,hrm->nm", modes, out_weight)


def reference_modes(argument: Tensor, delta: Tensor) -> Tensor:
    """M `[N, h, r]` of the sigmoid's argument `[N, h, d]` and Δ `[h, d, κ, r]`."""
    basis = spline_basis(torch.sigmoid(argument), delta.shape[2])  # [N, h, d, κ]
    factors = torch.einsum("nhsj,hsjr->nhsr", basis, 1 + delta)
    return factors.prod(2)


def spline_basis(x: Tensor, knots: int) -> Tensor:
    """Quadratic B-splines centered on `knots` uniform knots of [0, 1], summing to one.

    Args:
        x: any shape, values in [0, 1].
        knots: κ; knot j stands at j/(κ-1).

    Returns:
        `[*x.shape, κ]`; at most three of the κ values are not zero. The division by the sum
        matters only within half a knot spacing of a border, where a neighbor is missing.
    """
    centers = torch.arange(knots, device=x.device, dtype=x.dtype)
    u = (x.unsqueeze(-1) * (knots - 1) - centers).abs()
    inner = 0.75 - u * u
    outer = 0.5 * (1.5 - u).clamp(min=0).square()
    basis = torch.where(u < 0.5, inner, outer)
    return basis / basis.sum(-1, keepdim=True)
