"""Values and all gradients of every kind against the float64 oracle, where they are hardest."""

import math

import pytest
import torch
from oracle import vectors

from leviathan.config.embeddings import KINDS
from leviathan.model.embeddings.base import InputEmbedding

SPLINES = ("leviathan", "leviathan_v1")
# 96 ids in base 5 with 3 digits: both ends, around each change of a digit, and repeats.
BOUNDARY_IDS = [0, 1, 4, 5, 24, 25, 26, 49, 50, 64, 89, 94, 95, 0, 25, 95]
# Of the largest entry. float64: some hundred roundings of 1e-16. fp32: of 6e-8, and sums over ids.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
ZERO = 1e-6  # of the largest gradient: saturated latents, and splines without a slope
OUTSIDE = {"latent_scale": "outside"}
INSIDE = {"latent_scale": "inside"}


def at_step_zero(embedding: InputEmbedding) -> None:
    """As drawn."""


def shaken(embedding: InputEmbedding) -> None:
    """Every parameter off its initial value, so that none is without effect."""
    generator = torch.Generator().manual_seed(3)
    for parameter in embedding.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def zero_factors(embedding: InputEmbedding) -> None:
    """A factor of exactly zero in one head, and two in the other: ΣB = 1, so Δ = -1 makes one."""
    shaken(embedding)
    embedding.spline_delta[0, 1] = -1
    embedding.spline_delta[1, 3] = embedding.spline_delta[1, 6] = -1


def zero_beside_large_factors(embedding: InputEmbedding) -> None:
    """Without its zero, the product would be 2,000⁷."""
    shaken(embedding)
    embedding.spline_delta.mul_(0.1).add_(2_000)
    embedding.spline_delta[:, 2] = -1


def at_position(position: float):
    """All latents at this many knot spacings from 0: the norms' gains are zero, the biases rule."""

    def prepare(embedding: InputEmbedding) -> None:
        shaken(embedding)
        x = position / (embedding.spline_delta.shape[2] - 1)
        argument = math.inf if x == 1 else math.log(x / (1 - x)) if x else -math.inf
        argument = max(-60.0, min(60.0, argument))
        embedding.norm_weight.zero_()
        embedding.norm_bias.fill_(2 * argument if embedding.latent_scale == "outside" else argument)

    prepare.__name__ = f"latents at {position}"
    return prepare


def small_variance(embedding: InputEmbedding) -> None:
    """Latents whose variance is near the LayerNorm's ε, where that matters most."""
    shaken(embedding)
    embedding.latent_weight.mul_(1e-3)
    embedding.latent_bias.mul_(1e-3)


# κ = 5: both borders, each knot, halfway between knots, and inside the borders' half spacings.
POSITIONS = [0, 0.25, 0.5, 1, 1.5, 2, 2.75, 3, 3.5, 3.75, 4]
CASES = [(kind, shaken, OUTSIDE) for kind in KINDS]
CASES += [
    (kind, prepare, lev)
    for kind in SPLINES
    for lev in (OUTSIDE, INSIDE)
    for prepare in (at_step_zero, shaken, zero_factors, zero_beside_large_factors, small_variance)
]
CASES += [(kind, at_position(x), OUTSIDE) for kind in SPLINES for x in POSITIONS]


def figure_name(value):
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("kind", "prepare", "lev"), CASES, ids=figure_name)
def test_values_and_all_gradients(make_model, kind, prepare, lev):
    embedding = make_model(kind, lev=lev if kind in SPLINES else None).model.embed_tokens
    with torch.no_grad():
        prepare(embedding)
    p = {n: v.detach().double().requires_grad_() for n, v in embedding.named_parameters()}
    distinct = sorted(set(BOUNDARY_IDS))
    rows = vectors(kind, distinct, p, lev == OUTSIDE)
    expected = rows[[distinct.index(token) for token in BOUNDARY_IDS]]
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    exact = torch.autograd.grad((expected * weights).sum(), list(p.values())) if p else ()
    largest = max((float(gradient.abs().max()) for gradient in exact), default=0.0)

    for dtype in TOLERANCE:
        embedding = embedding.to(dtype)
        found = embedding(torch.tensor([BOUNDARY_IDS]))[0]
        assert_close(found, expected, dtype, "values")
        if p:
            loss = (found * weights.to(dtype)).sum()
            ours = torch.autograd.grad(loss, list(embedding.parameters()))
            for name, mine, theirs in zip(p, ours, exact, strict=True):
                assert_close(mine, theirs, dtype, name, largest)


def assert_close(found, expected, dtype, name, largest=0.0):
    """What is zero but for rounding is compared on the scale of the largest gradient."""
    assert found.shape == expected.shape, name
    assert bool(found.isfinite().all()), name
    scale = float(expected.detach().abs().max())
    scale = largest if scale < ZERO * largest else max(scale, 1e-30)
    worst = float((found.double() - expected).detach().abs().max()) / scale
    assert worst < TOLERANCE[dtype], f"{name}: {worst:.3g} of the largest entry"
