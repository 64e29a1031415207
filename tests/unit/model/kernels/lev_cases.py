"""Parameters for LEV's tests: random, away from their initial values, some factors exactly zero."""

import torch

from leviathan.model.kernels.lev import Parameters

SHAPES = {
    "even": dict(k=3, b=5, h=2, d=8, knots=5, r=4, width=6),
    "odd": dict(k=2, b=12, h=3, d=13, knots=7, r=3, width=5),
    "two knots": dict(k=3, b=5, h=1, d=5, knots=2, r=1, width=3),
    "one seed dimension": dict(k=3, b=5, h=2, d=1, knots=4, r=2, width=3),
    "long product": dict(k=3, b=5, h=2, d=128, knots=16, r=8, width=16),
}


def parameters(shape: str, dtype: torch.dtype = torch.float64, zeros: bool = True) -> Parameters:
    k, b, h, d, knots, r, width = SHAPES[shape].values()
    generator = torch.Generator().manual_seed(len(shape))

    def normal(*size: int, std: float, mean: float = 0.0) -> torch.Tensor:
        values = torch.randn(size, generator=generator, dtype=torch.float64) * std + mean
        return values.to(dtype).requires_grad_()

    p = Parameters(
        codebooks=normal(k, b, d, std=1),
        latent_weight=normal(h, d, d, std=0.3),
        latent_bias=normal(h, d, std=0.3),
        norm_weight=normal(h, d, std=0.5, mean=2),
        norm_bias=normal(h, d, std=0.5),
        spline_delta=normal(h, d, knots, r, std=0.2),
        out_weight=normal(h, r, width, std=0.5),
    )
    if zeros:  # ΣB = 1, so Δ = -1 at every knot of a dimension makes its factor exactly zero
        with torch.no_grad():
            p.spline_delta[0, 0] = -1
            p.spline_delta[-1, -1, :, 0] = -1
    return p
