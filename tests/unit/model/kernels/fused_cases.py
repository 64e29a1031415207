"""Run by test_fused.py with TRITON_INTERPRET=1: the fused kernels' largest errors, as JSON lines.

On its own, because Triton decides at its import whether its functions are interpreted.
"""

import json
import math
import sys
import warnings

import torch

from leviathan.model.kernels.reference import reference_modes
from leviathan.model.kernels.triton import FusedModes

CASES = {  # ids, h, d, κ, r
    "powers of two": (64, 2, 8, 4, 64),
    "nothing divides": (5, 2, 9, 5, 3),
    "a prime seed width and two knots": (33, 2, 7, 2, 20),
    "wide rank, several tiles a program": (150, 1, 12, 16, 100),
    "one seed dimension": (3, 1, 1, 6, 16),
}


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest entry."""
    assert bool(ours.isfinite().all())
    theirs = theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def compare(argument: torch.Tensor, delta: torch.Tensor, grad: torch.Tensor) -> dict:
    """Values and gradients against the reference in float64; whether two runs give the same."""
    runs = []
    for _ in range(2):
        path = FusedModes(delta, len(argument), gradient=True)
        forward = path.forward(argument)
        runs.append((forward, *path.backward(argument, grad), path.grad_delta))
    exact = [x.double().requires_grad_() for x in (argument, delta)]
    modes = reference_modes(*exact)
    wanted = (modes, modes, *torch.autograd.grad(modes, exact, grad.double()))
    names = ("modes", "modes_again", "grad_argument", "grad_delta")
    errors = dict(zip(names, map(error, runs[0], wanted), strict=True))
    same = all(a.equal(b) for a, b in zip(*runs, strict=True))
    return {"errors": errors, "same": same}


def random_case(n: int, h: int, d: int, knots: int, r: int) -> dict:
    """Arguments out to both borders of [0, 1], one factor zero for all ids and ranks."""
    generator = torch.Generator().manual_seed(n)
    argument = torch.randn(n, h, d, generator=generator) * 2
    argument[0, 0, 0], argument[1, 0, 0] = 200, -200
    argument[2, 0, 0] = torch.logit(torch.tensor(0.5 / (knots - 1)))
    delta = torch.randn(h, d, knots, r, generator=generator) * 0.3
    if h > 1:
        delta[0, d // 2] = -1
    return compare(argument, delta, torch.randn(n, h, r, generator=generator))


def wide_range() -> dict:
    """64 factors of 100 and 64 of 1/100: fp32 has no room for 1e128 along the way to 1."""
    factors = torch.cat([torch.full((64,), 100.0), torch.full((64,), 0.01)])
    delta = (factors - 1).view(1, 128, 1, 1).expand(1, 128, 5, 3).contiguous()
    path = FusedModes(delta, 4, gradient=True)
    modes, _ = path.backward(torch.zeros(4, 1, 128), torch.ones(4, 1, 3))
    # dM/dΔ summed over the knots is M over the factor, for each of the four ids
    ratio = path.grad_delta.sum(2)[0] * factors[:, None] / 4
    ones = torch.ones(1)
    return {"errors": {"modes": error(modes, ones), "grad_delta": error(ratio, ones)}, "same": True}


def not_finite() -> dict:
    """One bad argument: its own modes and gradients are NaN, the others right."""
    generator = torch.Generator().manual_seed(1)
    argument = torch.randn(9, 2, 8, generator=generator)
    delta = torch.randn(2, 8, 5, 3, generator=generator) * 0.3
    expected = reference_modes(argument.double(), delta.double())
    argument[4, 1, 6] = math.nan
    path = FusedModes(delta, 9, gradient=True)
    forward = path.forward(argument)
    again, grad = path.backward(argument, torch.ones(9, 2, 3))
    for modes in (forward, again):
        assert bool(modes[4, 1].isnan().all())
    assert bool(grad[4, 1].isnan().all())
    assert bool(grad[:4].isfinite().all())
    for modes in (forward, again):
        modes[4, 1] = expected[4, 1]
    errors = {"modes": error(forward, expected), "modes_again": error(again, expected)}
    return {"errors": errors, "same": True}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "overflow encountered in exp")
    for name, sizes in CASES.items():
        print(json.dumps({"case": name, **random_case(*sizes)}))
    print(json.dumps({"case": "wide range", **wide_range()}))
    print(json.dumps({"case": "NaN", **not_finite()}))
    sys.exit(0)
