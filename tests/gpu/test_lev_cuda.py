"""LEV on CUDA compared with the reference; skipped without a GPU."""

import pytest
import torch

from leviathan.model.kernels.lev import Parameters, lev_vectors
from leviathan.model.kernels.reference import reference_vectors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOLERANCE = 1e-4  # of the largest entry; fp32 sums of thousands of terms of 128 factors each


@pytest.mark.parametrize("ids", [1, 100, 3000])
@pytest.mark.parametrize(("knots", "rank"), [(16, 64), (5, 20)])
def test_values_gradients_and_determinism(ids, knots, rank):
    generator = torch.Generator().manual_seed(ids)

    def normal(*size, std, mean=0.0):
        values = torch.randn(size, generator=generator) * std + mean
        return values.cuda().requires_grad_()

    h, d, b = 8, 128, 59
    p = Parameters(
        normal(3, b, d, std=0.02),
        normal(h, d, d, std=0.02),
        normal(h, d, std=0.02),
        normal(h, d, std=0.1, mean=1),
        normal(h, d, std=0.1),
        normal(h, d, knots, rank, std=0.1),
        normal(h, rank, 256, std=0.02),
    )
    chosen = torch.randint(0, b**3, (ids,), generator=generator).cuda()
    grad = torch.randn(ids, 256, generator=generator).cuda()
    runs = [(rows := lev_vectors(chosen, p), *torch.autograd.grad(rows, p, grad)) for _ in range(2)]
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))
    exact = Parameters(*(x.detach().double().requires_grad_() for x in p))
    wanted = [torch.zeros_like(x) for x in exact]
    rows = []
    for part in torch.arange(ids, device="cuda").split(256):
        rows.append(reference_vectors(chosen[part], exact))
        for total, x in zip(
            wanted, torch.autograd.grad(rows[-1], exact, grad[part].double()), strict=True
        ):
            total += x
        rows[-1] = rows[-1].detach()
    for ours, theirs in zip(runs[0], (torch.cat(rows), *wanted), strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE
