"""What holds for every kind of input embedding; test_oracle.py compares values and gradients."""

import re

import pytest
import torch
import torch.nn.functional as F

from leviathan.config.embeddings import KINDS
from leviathan.config.run import OptimConfig
from leviathan.model.transformer import CausalLM
from leviathan.optim import resolve_groups

GENERATED = ["albert", "flat_mlp", "factored_mlp", "leviathan", "leviathan_v1"]


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
    torch.testing.assert_close(F.embedding(ids, embedding.materialize()), expected)
    parameters = list(embedding.parameters())
    if parameters:
        loss = embedding(ids, padded, inverse).square().sum()
        grads = torch.autograd.grad(loss, parameters)
        plain = torch.autograd.grad(embedding(ids).square().sum(), parameters)
        for ours, theirs in zip(grads, plain, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_materialize_is_forward_of_every_id(make_model, kind):
    embedding = make_model(kind).model.embed_tokens
    table = embedding.materialize(chunk=7)
    torch.testing.assert_close(table, embedding(torch.arange(96)[None])[0])
    assert not table.requires_grad
    assert embedding.materialize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_follows_the_parameters(make_model, kind):
    embedding = make_model(kind).bfloat16().model.embed_tokens
    assert embedding(torch.tensor([[0, 5]])).dtype == torch.bfloat16
    assert embedding.materialize().dtype == torch.bfloat16


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
    table = make_model(kind).model.embed_tokens.materialize()
    assert float(table.std()) == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("kind", [*GENERATED, "binary_codes"])
def test_another_scale_and_none(make_model, kind):
    other = make_model(kind, lev={"embedding_init_std": 0.5}).model.embed_tokens
    assert float(other.materialize().std()) == pytest.approx(0.5, rel=0.03)
    free = make_model(kind, lev={"embedding_init_std": None}).model.embed_tokens
    table, scaled = free.materialize(), other.materialize()
    torch.testing.assert_close(scaled, table * (scaled.std() / table.std()), rtol=1e-4, atol=1e-5)
    if kind == "binary_codes":
        assert bool((free.materialize().abs() == 1).all())


def test_all_ids_have_different_codes(make_model):
    model = make_model("binary_codes", vocab_size=1025, padded_vocab_size=1025)
    assert len(model.model.embed_tokens.materialize().unique(dim=0)) == 1025  # eleven bits of 32


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
