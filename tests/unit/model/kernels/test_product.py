"""The product tree: values, gradients at zero factors, range."""

import math

import pytest
import torch
from torch import Tensor

from leviathan.model.kernels.cpu import ProductTree


class _Product(torch.autograd.Function):
    """Of `[s, n, r]` over s."""

    @staticmethod
    def forward(ctx, factors: Tensor) -> Tensor:
        ctx.tree = ProductTree(tuple(factors.shape), factors, gradient=True)
        return ctx.tree.multiply(factors.detach().clone(), float(factors.abs().max())).clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return ctx.tree.backward(grad).clone()


tree_product = _Product.apply


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 13, 37, 128])
@pytest.mark.parametrize("spread", [0.3, 3])
def test_equals_prod(count, spread):
    generator = torch.Generator().manual_seed(count)
    factors = torch.randn(count, 5, 3, generator=generator, dtype=torch.float64) * spread + 1
    factors.requires_grad_()
    product, expected = tree_product(factors), factors.prod(0)
    torch.testing.assert_close(product, expected, rtol=1e-12, atol=0)
    grad = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    (ours,) = torch.autograd.grad(product, factors, grad)
    (theirs,) = torch.autograd.grad(expected, factors, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=0)


@pytest.mark.parametrize("zeros", [[], [0], [18], [2, 17], list(range(19))])
def test_gradient_with_zero_factors(zeros):
    factors = torch.linspace(-1.5, 1.7, 19, dtype=torch.float64).repeat(2, 1).T[..., None].clone()
    factors[zeros, 0] = 0
    factors.requires_grad_()
    (grad,) = torch.autograd.grad(tree_product(factors).sum(), factors)
    for column in range(2):
        for s in range(19):
            others = torch.cat([factors[:s, column], factors[s + 1 :, column]]).detach()
            torch.testing.assert_close(grad[s, column], others.prod(0), rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(tree_product, (factors,))


@pytest.mark.parametrize("order", ["as they are", "reversed", "shuffled"])
def test_finite_where_the_product_is(order):
    """64 factors of 100 and 64 of 1/100: fp32 has no room for 1e128 along the way to 1."""
    factors = torch.cat([torch.full((64, 1, 1), 100.0), torch.full((64, 1, 1), 0.01)])
    shuffled = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    factors = {"reversed": factors.flip(0), "shuffled": factors[shuffled]}.get(order, factors)
    factors.requires_grad_()
    product = tree_product(factors)
    torch.testing.assert_close(product, torch.ones(1, 1), rtol=1e-4, atol=0)
    (grad,) = torch.autograd.grad(product.sum(), factors)
    torch.testing.assert_close(grad, 1 / factors.detach(), rtol=1e-4, atol=0)


def test_a_factor_below_the_normal_numbers():
    factors = torch.ones(16, 1, 1)
    factors[3], factors[8], factors[13] = 2.0**-140, 2.0**100, 2.0**50
    assert tree_product(factors).tolist() == [[2.0**10]]


def test_underflow_inside_a_fast_node_is_seen():
    """Sixteen factors whose product is normal, but whose first four already underflow to zero."""
    factors = torch.ones(128, 1, 1)
    factors[::8] = torch.tensor([2.0**-35] * 8 + [2.0**35] * 8).view(16, 1, 1)
    factors.requires_grad_()
    product = tree_product(factors)
    assert product.item() == 1
    (grad,) = torch.autograd.grad(product.sum(), factors)
    assert grad.equal(1 / factors.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2.0, 1e3, 1e4, 1e20, 1e-4])
@pytest.mark.parametrize("count", [3, 16, 128])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_zero_beside_any_factors_makes_zero(dtype, size, count, place):
    """And gradients: zero for the others, for the zero itself their product, perhaps infinite."""
    factors = torch.full((count, 2, 1), size, dtype=dtype)
    factors[:, 1] = 1.25
    factors[place, 0] = 0
    factors.requires_grad_()
    product = tree_product(factors)
    assert product[0].item() == 0
    torch.testing.assert_close(
        product[1].double(), torch.tensor([1.25**count]).double(), rtol=1e-5, atol=0
    )
    (grad,) = torch.autograd.grad(product.sum(), factors)
    others = torch.ones(count, dtype=torch.bool)
    others[place] = False
    assert not grad[others, 0].any()
    exact = torch.tensor(float(torch.tensor(size).double().log2() * (count - 1)))
    limit = math.log2(torch.finfo(dtype).max)
    if exact < -limit:
        assert grad[place, 0].item() < torch.finfo(dtype).tiny
    elif exact > limit:
        assert grad[place, 0].item() == math.inf
    else:
        assert grad[place, 0].double().log2().item() == pytest.approx(float(exact), rel=1e-4)
    without = ProductTree(tuple(factors.shape), factors, gradient=False)
    assert without.multiply(factors.detach().clone(), size)[0].item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [3, 16, 128])
def test_what_is_not_finite_reaches_its_own_product_alone(value, count):
    factors = torch.full((count, 3, 2), 1.1)
    factors[:, 1] = 100.0  # overflows: needs the scaling that a NaN must not switch off
    factors[: count // 2, 1] = 0.01
    factors[1, 0, 0] = value
    expected = factors.double().prod(0)
    tree = ProductTree(tuple(factors.shape), factors, gradient=True)
    product = tree.multiply(factors.clone(), float(factors.abs().max()))
    torch.testing.assert_close(product.double(), expected, rtol=1e-4, atol=0, equal_nan=True)
    grad = tree.backward(torch.ones(3, 2))
    assert bool(grad[:, 1:].isfinite().all())
    assert bool(grad[:, 0, 1].isfinite().all())


def test_buffers_serve_again():
    factors = torch.empty(9, 2, 3)
    tree = ProductTree((9, 2, 3), factors, gradient=True)
    for scale in (1e6, 1.0, 1e-6):  # scaled, plain, scaled
        factors.copy_(torch.rand(9, 2, 3, generator=torch.Generator().manual_seed(1)) + 0.5)
        factors[4] *= scale
        expected = factors.double().requires_grad_()
        product = expected.prod(0)
        grads = torch.autograd.grad(product.sum(), expected)[0]
        ours = tree.multiply(factors, float(factors.max()))
        torch.testing.assert_close(ours, product.float(), rtol=1e-5, atol=0)
        torch.testing.assert_close(
            tree.backward(torch.ones(2, 3)), grads.float(), rtol=1e-5, atol=0
        )
    assert math.isfinite(float(tree.multiply(factors, 1e9).max()))
