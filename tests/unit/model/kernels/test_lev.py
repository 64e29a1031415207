"""LEV's operation against its literal reading: values and all gradients, however it is run."""

import math

import pytest
import torch
from lev_cases import SHAPES, parameters
from torch.utils.checkpoint import checkpoint

from leviathan.model.kernels import cpu as blocked
from leviathan.model.kernels.cpu import in_parallel
from leviathan.model.kernels.lev import Parameters, digits_of, lev_vectors
from leviathan.model.kernels.reference import reference_vectors

FP32_TOLERANCE = 1e-4  # of the largest entry; sums of a few hundred terms, each of 128 factors
IDS = torch.tensor([0, 1, 7, 7, 62, 99, 124, 3, 50])


def gradients(rows, p):
    grad = torch.linspace(-1, 1, rows.numel()).view_as(rows).to(rows.dtype)
    return torch.autograd.grad(rows, p, grad)


def assert_near(ours, theirs, tolerance):
    for name, a, b in zip(("E", *Parameters._fields), ours, theirs, strict=True):
        scale = float(b.detach().abs().max())
        torch.testing.assert_close(
            a.to(b.dtype),
            b,
            rtol=0,
            atol=tolerance * scale + 1e-300,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_values_and_gradients_are_the_references(shape, inside, zeros):
    p = parameters(shape, zeros=zeros)
    ours, theirs = lev_vectors(IDS, p, inside), reference_vectors(IDS, p, inside)
    assert_near([ours, *gradients(ours, p)], [theirs, *gradients(theirs, p)], 1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_near_float64(shape):
    p = parameters(shape)
    low = Parameters(*(x.detach().float().requires_grad_() for x in p))
    ours, theirs = lev_vectors(IDS, low), reference_vectors(IDS, p)
    assert ours.dtype == torch.float32
    assert_near([ours, *gradients(ours, low)], [theirs, *gradients(theirs, p)], FP32_TOLERANCE)


def test_bf16_parameters_accumulate_in_fp32():
    p = Parameters(*(x.detach().bfloat16().requires_grad_() for x in parameters("long product")))
    exact = Parameters(*(x.detach().double().requires_grad_() for x in p))
    ours, theirs = lev_vectors(IDS, p), reference_vectors(IDS, exact)
    assert ours.dtype == torch.bfloat16
    rounding = 2.0**-8  # of bf16, once: at the end
    assert_near([ours, *gradients(ours, p)], [theirs, *gradients(theirs, exact)], rounding)


def test_gradcheck():
    p = tuple(parameters("even"))
    assert torch.autograd.gradcheck(
        lambda *p: lev_vectors(IDS[:4], Parameters(*p)), p, fast_mode=True
    )


def test_zero_factor_has_the_gradient_of_the_others_product():
    """Dividing the product by the factor, or summing logarithms, would give 0 or NaN."""
    p = parameters("even", zeros=False)
    with torch.no_grad():
        p.spline_delta[0, 3] = -1  # makes factor 3 of head 0 zero for every id
    theirs = torch.autograd.grad(reference_vectors(IDS, p).sum(), p.spline_delta)[0]
    ours = torch.autograd.grad(lev_vectors(IDS, p).sum(), p.spline_delta)[0]
    assert bool(ours[0, 3].abs().max() > 1e-3)
    assert not ours[0, :3].any()
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("elements", [1, 2**20])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_blocks_and_workers_change_nothing(monkeypatch, elements, threads):
    monkeypatch.setattr(blocked, "CACHED_ELEMENTS", elements)  # 1: blocks of 16 ids
    p, ids = parameters("odd"), torch.arange(143)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = lev_vectors(ids, p)
        ours = [ours, *gradients(ours, p)]
        again = lev_vectors(ids, p)
        again = [again, *gradients(again, p)]
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(a.equal(b) for a, b in zip(ours, again, strict=True))
    theirs = reference_vectors(ids, p)
    assert_near(ours, [theirs, *gradients(theirs, p)], 1e-11)


def test_an_error_in_a_worker_is_raised():
    def fail(part):
        raise ValueError(f"from {part.start}")

    with pytest.raises(ValueError, match="from 0"):
        in_parallel(fail, 200)


def test_no_ids():
    p = parameters("even")
    rows = lev_vectors(IDS[:0], p)
    assert rows.shape == (0, 6)
    assert not any(grad.any() for grad in torch.autograd.grad(rows.sum(), p))


def test_keeps_nothing_but_ids_and_parameters():
    p, kept = parameters("long product"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lev_vectors(IDS, p)
    allowed = {x.data_ptr() for x in (IDS, *p)}
    assert kept
    assert {t.data_ptr() for t in kept} <= allowed


def test_under_compile_without_a_graph_break():
    p = parameters("even")
    torch.library.opcheck(torch.ops.leviathan.lev_vectors, (IDS, *p, False))
    compiled = torch.compile(lev_vectors, backend="aot_eager", fullgraph=True)
    ours, theirs = compiled(IDS, p), lev_vectors(IDS, p)
    assert_near([ours, *gradients(ours, p)], [theirs, *gradients(theirs, p)], 1e-14)


def test_under_activation_checkpointing():
    p = parameters("even")
    ours = checkpoint(lev_vectors, IDS, p, use_reentrant=False)
    theirs = lev_vectors(IDS, p)
    assert_near([ours, *gradients(ours, p)], [theirs, *gradients(theirs, p)], 1e-14)


def test_digits_are_most_significant_first_and_tell_all_ids_apart():
    digits = digits_of(torch.arange(200_376), 59, 3)
    assert digits[0].tolist() == [0, 0, 0]
    assert digits[1].tolist() == [0, 0, 1]
    assert digits[200_375].tolist() == [200_375 // 59**2, 200_375 // 59 % 59, 200_375 % 59]
    assert int(digits.max()) == 58
    assert (digits @ torch.tensor([59**2, 59, 1])).equal(torch.arange(200_376))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, math.nan) for name in Parameters._fields),
        ("codebooks", math.inf),
        ("spline_delta", math.inf),
        ("out_weight", -math.inf),
    ],
)
def test_what_is_not_finite_reaches_the_rows_and_gradients(name, value):
    """It is for the training loop to see it and skip the step: nothing here may fail."""
    p = parameters("long product", torch.float32)
    with torch.no_grad():
        getattr(p, name).view(-1)[0] = value
    rows = lev_vectors(torch.arange(100), p)
    assert not bool(rows.isfinite().all())
    gradients = torch.autograd.grad(rows.sum(), list(p))
    assert not all(bool(gradient.isfinite().all()) for gradient in gradients)
