"""LEV against a literal, slow reading of its definition."""

import math

import numpy as np
import pytest
import torch

from leviathan.model.embedding import build_embedding
from leviathan.model.embedding.leviathan import LeviathanEmbedding

FP32_TOLERANCE = 2e-5  # relative; some 20 roundings of 6e-8 around products of 8 factors


def slow_basis(x: float, knots: int) -> list[float]:
    values = []
    for j in range(knots):
        u = abs(x - j / (knots - 1)) * (knots - 1)
        values.append(0.75 - u**2 if u < 0.5 else 0.5 * (1.5 - u) ** 2 if u < 1.5 else 0.0)
    return [value / sum(values) for value in values]


def slow_row(token: int, lev: LeviathanEmbedding, outside: bool) -> list[float]:
    """E of one id, in Python floats, step by step as the paper has it."""
    p = {name: value.detach().double().numpy() for name, value in lev.named_parameters()}
    (k, b, d), (h, _, knots, r) = p["codebooks"].shape, p["spline_delta"].shape
    digits = [token // b ** (k - 1 - place) % b for place in range(k)]
    seed = sum(p["codebooks"][place][digit] for place, digit in enumerate(digits))
    row = np.zeros(p["out_weight"].shape[2])
    for head in range(h):
        mixed = p["latent_weight"][head] @ seed + p["latent_bias"][head]
        mixed = mixed if outside else mixed / 2
        normal = (mixed - mixed.mean()) / math.sqrt(mixed.var() + 1e-5)
        normal = normal * p["norm_weight"][head] + p["norm_bias"][head]
        latent = 1 / (1 + np.exp(-(normal / 2 if outside else normal)))
        for rho in range(r):
            mode = 1.0
            for s in range(d):
                basis = slow_basis(latent[s], knots)
                mode *= sum(
                    basis[j] * (1 + p["spline_delta"][head, s, j, rho]) for j in range(knots)
                )
            row += p["out_weight"][head, rho] * mode
    return list(row)


def shaken(lev: LeviathanEmbedding) -> LeviathanEmbedding:
    """Moves every parameter off its initial value, so that none is without effect."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in lev.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return lev


@pytest.mark.parametrize("scale", ["outside", "inside"])
def test_rows_equal_the_slow_formula(make_model, scale):
    lev = shaken(make_model(lev={"latent_scale": scale}).model.embed_tokens)
    ids = torch.tensor([0, 1, 24, 25, 89, 95])
    slow = torch.tensor([slow_row(int(i), lev, scale == "outside") for i in ids])
    fast = lev.double()(ids[None])[0]
    torch.testing.assert_close(fast, slow.double(), rtol=1e-11, atol=1e-12)


def test_fp32_rows_are_near_the_slow_formula(make_model):
    lev = make_model().model.embed_tokens
    slow = torch.tensor([slow_row(int(i), lev, True) for i in (0, 50, 95)])
    fast = lev(torch.tensor([[0, 50, 95]]))[0].double()
    torch.testing.assert_close(fast, slow, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE * 0.02)


def test_gradients_of_every_parameter(make_model):
    lev = shaken(make_model(d_model=8, lev={"d_seed": 4, "rank": 2}).model.embed_tokens.double())
    with torch.no_grad():
        # ΣB = 1, so Δ = -1 at every knot of one dimension makes its factor exactly zero.
        lev.spline_delta[0, 1] = -1
        lev.spline_delta[0, 3, :, 0] = -1
    names, values = zip(*lev.named_parameters(), strict=True)
    ids = torch.tensor([[0, 17, 17, 95]])

    def embed(*parameters):
        return torch.func.functional_call(lev, dict(zip(names, parameters, strict=True)), (ids,))

    assert torch.autograd.gradcheck(embed, values)


@pytest.mark.parametrize("wanted", [0.02, 0.5])
def test_embedding_init_std_is_met(make_model, wanted):
    table = make_model(lev={"embedding_init_std": wanted}).model.embed_tokens.materialise()
    assert float(table.std()) == pytest.approx(wanted, rel=0.01)


def test_embedding_init_std_null_leaves_the_published_values(make_model):
    lev = make_model(lev={"embedding_init_std": None}).model.embed_tokens
    assert lev.out_weight.std().item() == pytest.approx(0.02 / math.sqrt(2), rel=0.2)
    scaled = make_model().model.embed_tokens
    ratio = scaled.out_weight / lev.out_weight
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))
    assert scaled.codebooks.equal(lev.codebooks)


def test_init_of_the_papers_shape():
    """E has std about 0.23 and a mean cosine of 0.62 between tokens, as LEV is published."""
    from leviathan.config.schema import ModelConfig
    from leviathan.model.init import draw

    config = ModelConfig.model_validate(
        {"d_model": 64, "n_layers": 1, "n_heads": 2, "vocab_size": 200_376}
        | {"embedding": {"kind": "leviathan", "embedding_init_std": None}}
    )
    lev = build_embedding(config)
    with torch.no_grad():
        for name, how in lev.initial(config).items():
            parameter = lev.get_parameter(name)
            parameter.copy_(draw(name, parameter.shape, how, seed=1))
        rows = lev.rows(torch.arange(0, 200_376, 2003))
    unit = torch.nn.functional.normalize(rows, dim=-1)
    cosine = (unit @ unit.T).fill_diagonal_(0).sum() / (len(rows) * (len(rows) - 1))
    assert float(rows.std()) == pytest.approx(0.23, abs=0.03)
    assert float(cosine) == pytest.approx(0.62, abs=0.06)


def test_bf16_parameters_accumulate_in_fp32(make_model):
    lev = make_model().model.embed_tokens.bfloat16()
    ids = torch.arange(96)[None]
    low = lev(ids)
    assert low.dtype == torch.bfloat16
    # The same rounded parameters in fp32: only the result's own rounding may differ.
    torch.testing.assert_close(low, lev.float()(ids).bfloat16(), rtol=0, atol=0)
    low = lev.bfloat16()(ids)
    low.float().square().sum().backward()
    for name, parameter in lev.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
