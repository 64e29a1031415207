"""What holds for every kind of input embedding, and each kind against a slow reading of it."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from leviathan.config.optim import OptimConfig
from leviathan.model.embedding import KINDS, InputEmbedding
from leviathan.model.transformer import CausalLM
from leviathan.optim import resolve_groups

GENERATED = ["albert", "flat_mlp", "factored_mlp", "leviathan", "leviathan_v1"]


def shaken(embedding: InputEmbedding) -> InputEmbedding:
    """Moves every parameter off its initial value, so that none is without effect."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return embedding


def slow_basis(x: float, knots: int) -> list[float]:
    values = []
    for j in range(knots):
        u = abs(x - j / (knots - 1)) * (knots - 1)
        values.append(0.75 - u**2 if u < 0.5 else 0.5 * (1.5 - u) ** 2 if u < 1.5 else 0.0)
    return [value / sum(values) for value in values]


def silu(x):
    return x / (1 + np.exp(-x))


def slow_seed(token: int, codebooks: np.ndarray) -> np.ndarray:
    k, b, _ = codebooks.shape
    digits = [token // b ** (k - 1 - place) % b for place in range(k)]
    return sum(codebooks[place][digit] for place, digit in enumerate(digits))


def slow_v1(token: int, p: dict[str, np.ndarray], outside: bool) -> np.ndarray:
    mixed = p["latent_weight"] @ slow_seed(token, p["codebooks"]) + p["latent_bias"]
    mixed = mixed if outside else mixed / 2
    normal = (mixed - mixed.mean()) / math.sqrt(mixed.var() + 1e-5)
    normal = normal * p["norm_weight"] + p["norm_bias"]
    latent = 1 / (1 + np.exp(-(normal / 2 if outside else normal)))
    modes, d, knots, rank = p["spline_delta"].shape
    row = latent @ p["residual_weight"]
    for m in range(modes):
        for rho in range(rank):
            product = 1.0
            for s in range(d):
                basis = slow_basis(latent[s], knots)
                product *= sum(
                    basis[j] * (1 + p["spline_delta"][m, s, j, rho]) for j in range(knots)
                )
            row = row + p["out_weight"][m, rho] * product
    return row


def slow_row(kind: str, token: int, embedding: InputEmbedding) -> np.ndarray:
    p = {n: v.detach().double().numpy() for n, v in embedding.named_parameters()}
    if kind in ("tied", "untied"):
        return p["weight"][token]
    if kind == "albert":
        return p["table"][token] @ p["projection"]
    if kind == "leviathan_v1":
        return slow_v1(token, p, embedding.latent_scale == "outside")
    if kind == "binary_codes":
        bits = [2 * int(bit) - 1 for bit in reversed(f"{token:07b}")]  # 96 ids need seven
        return np.array([0.02 * bits[column % 7] for column in range(32)])
    seed = p["table"][token] if kind == "flat_mlp" else slow_seed(token, p["codebooks"])
    return p["out_weight"] @ silu(p["hidden_weight"] @ seed + p["hidden_bias"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "leviathan"])
def test_rows_equal_the_slow_formula(make_model, kind):
    embedding = shaken(make_model(kind).model.embed_tokens).double()
    ids = [0, 1, 24, 25, 64, 89, 95]
    slow = torch.tensor(np.stack([slow_row(kind, i, embedding) for i in ids]))
    torch.testing.assert_close(embedding(torch.tensor([ids]))[0], slow, rtol=1e-11, atol=1e-12)


def test_the_other_latent_scale_of_the_first_version(make_model):
    embedding = make_model("leviathan_v1", lev={"latent_scale": "inside"}).model.embed_tokens
    embedding = shaken(embedding).double()
    slow = torch.tensor(slow_row("leviathan_v1", 77, embedding))
    torch.testing.assert_close(embedding(torch.tensor([77]))[0], slow, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in GENERATED if kind != "leviathan"])
def test_gradients_of_every_parameter(make_model, kind):
    small = {
        "albert": {"width": 3},
        "flat_mlp": {"width": 2, "hidden": 5},
        "factored_mlp": {"d_seed": 4, "hidden": 5},
        "leviathan_v1": {"d_seed": 4, "rank": 2},
    }
    model = make_model(kind, d_model=8, lev=small[kind])
    embedding = shaken(model.model.embed_tokens.double())
    if kind == "leviathan_v1":
        with torch.no_grad():
            embedding.spline_delta[0, 1] = -1  # a factor of exactly zero: ΣB = 1
    names, values = zip(*embedding.named_parameters(), strict=True)
    ids = torch.tensor([[0, 17, 17, 95]])

    def embed(*parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(embedding, given, (ids,))

    assert torch.autograd.gradcheck(embed, values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [-1, 96, 124, 10**9])
def test_id_outside_the_vocabulary_is_an_error(make_model, kind, wrong):
    """96 … 124 have digits (5³ = 125) and must not slip through for that."""
    embedding = make_model(kind).model.embed_tokens
    with pytest.raises(IndexError, match=r"outside the vocabulary \[0, 96\)"):
        embedding(torch.tensor([[0, wrong]]))


@pytest.mark.parametrize("kind", KINDS)
def test_unique_ids_of_the_loader_change_nothing(make_model, kind):
    embedding = make_model(kind).model.embed_tokens
    ids = torch.tensor([[3, 95, 3], [0, 3, 95]])
    padded = torch.tensor([0, 3, 95, 95, 95])
    inverse = torch.searchsorted(padded, ids)
    expected = embedding(ids)
    assert expected.shape == (2, 3, 32)
    torch.testing.assert_close(embedding(ids, padded, inverse), expected)
    torch.testing.assert_close(F.embedding(ids, embedding.materialise()), expected)
    parameters = list(embedding.parameters())
    if parameters:
        loss = embedding(ids, padded, inverse).square().sum()
        grads = torch.autograd.grad(loss, parameters)
        plain = torch.autograd.grad(embedding(ids).square().sum(), parameters)
        for ours, theirs in zip(grads, plain, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_materialise_is_forward_of_every_id(make_model, kind):
    embedding = make_model(kind).model.embed_tokens
    table = embedding.materialise(chunk=7)
    torch.testing.assert_close(table, embedding(torch.arange(96)[None])[0])
    assert not table.requires_grad
    assert embedding.materialise(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_follows_the_parameters(make_model, kind):
    embedding = make_model(kind).bfloat16().model.embed_tokens
    assert embedding(torch.tensor([[0, 5]])).dtype == torch.bfloat16
    assert embedding.materialise().dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_survives_the_meta_device(make_model, make_config, kind):
    model = make_model(kind)
    with torch.device("meta"):
        empty = CausalLM(make_config(kind))
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    ids = torch.tensor([[0, 5, 95]])
    assert empty.logits(ids).equal(model.logits(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_start_at_the_same_scale(make_model, kind):
    table = make_model(kind).model.embed_tokens.materialise()
    assert float(table.std()) == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("kind", [*GENERATED, "binary_codes"])
def test_another_scale_and_none(make_model, kind):
    other = make_model(kind, lev={"embedding_init_std": 0.5}).model.embed_tokens
    assert float(other.materialise().std()) == pytest.approx(0.5, rel=0.03)
    free = make_model(kind, lev={"embedding_init_std": None}).model.embed_tokens
    table, scaled = free.materialise(), other.materialise()
    torch.testing.assert_close(scaled, table * (scaled.std() / table.std()), rtol=1e-4, atol=1e-5)
    if kind == "binary_codes":
        assert bool((free.materialise().abs() == 1).all())


def test_all_ids_have_different_codes(make_model):
    model = make_model("binary_codes", vocab_size=1025, padded_vocab_size=1025)
    assert len(model.model.embed_tokens.materialise().unique(dim=0)) == 1025  # eleven bits of 32


def test_seeds_of_the_mlps_do_not_start_on_a_line(make_model):
    for kind in ("flat_mlp", "factored_mlp"):
        embedding = make_model(kind, lev={"hidden": 400}).model.embed_tokens
        seeds = embedding.seeds(torch.arange(96))
        arguments = (seeds @ embedding.hidden_weight.T).detach()
        assert float(arguments.std()) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_gains_and_biases_do_not_decay_whatever_their_shape(make_model, kind):
    """LEV's norms have gains and biases [h, d], which a rule by shape would decay."""
    model = make_model(kind)
    names = {name for name, _ in model.named_parameters()}
    exempt = {n for n in names if re.search(r"norm(\.weight|_weight|_bias)$|_bias$", n)}
    groups = resolve_groups(model, OptimConfig(weight_decay=0.1))
    found = {group.weight_decay: set(group.roles) for group in groups}
    assert found == {0.1: names - exempt, 0.0: exempt}
    (alone,) = resolve_groups(model, OptimConfig())
    assert set(alone.roles) == names
