"""The reference basis against the paper's formula, and the three weights against the reference."""

import math

import pytest
import torch

from leviathan.model.kernels.cpu import slope, weights
from leviathan.model.kernels.reference import spline_basis


def slow_basis(x: float, knots: int) -> list[float]:
    values = []
    for j in range(knots):
        u = abs(x - j / (knots - 1)) * (knots - 1)
        values.append(0.75 - u**2 if u < 0.5 else 0.5 * (1.5 - u) ** 2 if u < 1.5 else 0.0)
    return [value / sum(values) for value in values]


def points(knots: int) -> torch.Tensor:
    """Borders, half-way points and others."""
    step = 1 / (knots - 1)
    at = [0, step / 2, step, 0.5, 0.777, 1 - step, 1 - step / 2, 1]
    return torch.tensor(at, dtype=torch.float64)


@pytest.mark.parametrize("knots", [2, 3, 5, 16])
def test_reference_at_borders_and_between(knots):
    x = points(knots)
    basis = spline_basis(x, knots)
    slow = torch.tensor([slow_basis(float(value), knots) for value in x], dtype=torch.float64)
    torch.testing.assert_close(basis, slow, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(basis.sum(-1), torch.ones_like(x))
    assert int((basis > 0).sum(-1).max()) <= 3
    assert bool((basis >= 0).all())


def test_reference_by_hand():
    basis = spline_basis(torch.tensor([0.0, 0.125, 0.25, 1.0], dtype=torch.float64), 5)
    expected = [
        [6 / 7, 1 / 7, 0, 0, 0],  # at a border one neighbor is missing: ¾ and ⅛ over their sum
        [1 / 2, 1 / 2, 0, 0, 0],  # ½/(κ-1): half-way, u = ½ from two knots and 3/2 from the third
        [1 / 8, 3 / 4, 1 / 8, 0, 0],
        [0, 0, 0, 1 / 7, 6 / 7],
    ]
    torch.testing.assert_close(basis, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("knots", [2, 3, 5, 16])
def test_weights_and_slopes_are_the_references(knots):
    x = points(knots).view(1, 1, -1).requires_grad_()
    w = weights(x.detach(), knots)
    basis = torch.zeros(1, 1, x.numel(), knots + 2, dtype=torch.float64)
    places = torch.stack([w.knot, w.knot + 1, w.knot + 2], -1)
    basis.scatter_(-1, places, w.values.permute(0, 2, 3, 1))
    expected = spline_basis(x, knots)
    torch.testing.assert_close(basis[..., 1:-1], expected.detach(), rtol=1e-13, atol=1e-13)

    grad = torch.randn(expected.shape, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(expected, x, grad)
    padded = torch.nn.functional.pad(grad, (1, 1))
    ours = slope(w, knots, padded.gather(-1, places).permute(0, 3, 1, 2))
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


def test_nan_stays_nan_and_leaves_the_others_alone():
    """NaN has no knot: as an integer it would be an index outside every table."""
    x = torch.tensor([0.0, math.nan, 0.4, 1.0]).view(1, 1, 4)
    found, expected = weights(x, 5), weights(x.nan_to_num(0.5), 5)
    assert found.knot.tolist() == [[[0, 0, 2, 4]]]
    assert bool(found.values[..., 1].isnan().all())
    kept = [0, 2, 3]
    assert found.values[..., kept].equal(expected.values[..., kept])
