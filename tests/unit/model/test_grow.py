"""A vocabulary that grows: what was there stays to the bit."""

import pytest
import torch
from errors import raises_error

from leviathan.model.embedding import KINDS
from leviathan.model.grow import grow_vocabulary

DIGITAL = ["leviathan", "leviathan_v1", "factored_mlp"]


@pytest.mark.parametrize("kind", DIGITAL)
@pytest.mark.parametrize(("vocabulary", "rows"), [(90, None), (93, 93), (110, 112), (125, None)])
def test_old_logits_and_all_lev_parameters_stay(make_model, kind, vocabulary, rows):
    model = make_model(kind)  # 90 ids in 96 rows; 5³ = 125
    grown = grow_vocabulary(model, vocabulary, rows, seed=3)
    old, new = dict(model.named_parameters()), dict(grown.named_parameters())
    assert list(old) == list(new)
    for name, parameter in old.items():
        same = parameter[:90] if name == "lm_head.weight" else parameter
        assert new[name][: len(same)].equal(same), name
    assert new["lm_head.weight"].shape[0] == (rows or vocabulary)

    ids = torch.arange(90).view(6, 15)
    assert grown.hidden(ids).equal(model.hidden(ids))
    assert grown.logits(ids)[..., :90].equal(model.logits(ids)[..., :90])
    assert bool(grown.logits(ids)[..., :vocabulary].isfinite().all())
    assert bool((grown.logits(ids)[..., vocabulary:] == float("-inf")).all())


def test_new_ids_have_vectors_and_rows_and_learn(make_model):
    model = make_model()
    grown = grow_vocabulary(model, 125, seed=3)
    rows = grown.lm_head.weight[90:]
    assert rows.std().item() == pytest.approx(0.02, rel=0.1)
    vectors = grown.model.embed_tokens.materialize()
    assert len(vectors.unique(dim=0)) == 125
    assert vectors[:96].equal(model.model.embed_tokens.materialize())
    new = torch.arange(100, 120)[None]
    grown(new, new).backward()
    assert bool(grown.lm_head.weight.grad[100:120].any(-1).all())
    twin = grow_vocabulary(model, 125, seed=3)
    assert twin.lm_head.weight.equal(grown.lm_head.weight)
    assert not grow_vocabulary(model, 125, seed=4).lm_head.weight.equal(grown.lm_head.weight)


def test_bf16_stays_bf16(make_model):
    grown = grow_vocabulary(make_model().bfloat16(), 100, seed=0)
    assert {p.dtype for p in grown.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DIGITAL])
def test_kinds_with_a_row_per_id_cannot_grow(make_model, kind):
    with raises_error("grow.unsupported", kind):
        grow_vocabulary(make_model(kind), 100, seed=0)


@pytest.mark.parametrize(
    ("vocabulary", "rows", "message"),
    [
        (126, None, ("grow.too_large", "125")),
        (100, 126, ("grow.too_large", "125")),
        (89, None, ("grow.shrinks", "90", "89")),
        (100, 99, ("grow.shrinks", "90", "100", "99")),
    ],
)
def test_wrong_sizes(make_model, vocabulary, rows, message):
    with raises_error(*message):
        grow_vocabulary(make_model(), vocabulary, rows, seed=0)
