"""The whole model: loss, scores, tying, causality, and its backbone against transformers' Llama."""

import copy

import pytest
import torch
import torch.nn.functional as F

from leviathan.config.embeddings import KINDS
from leviathan.model.head import IGNORE
from leviathan.model.transformer import CausalLM

LLAMA_TOLERANCE = 2e-6  # logits of order 0.1 in fp32, sums in another order


def batch(rows: int = 3, length: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 90, (rows, length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :5] = IGNORE
    return ids[:, :-1], targets


@pytest.mark.parametrize("kind", KINDS)
def test_loss_scores_and_logits_agree(make_model, kind):
    model, (ids, targets) = make_model(kind), batch()
    logits = model.logits(ids)
    assert logits.shape == (3, 16, 96)
    assert logits.dtype == torch.float32
    expected = F.cross_entropy(
        logits[..., :90].flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = model(ids, targets)
    assert loss.dtype == torch.float32
    assert loss.requires_grad
    torch.testing.assert_close(loss, expected)
    scores = model.score(ids, targets)
    torch.testing.assert_close(scores.nll.sum(), expected)
    assert not scores.nll[targets == IGNORE].any()
    assert scores.is_greedy.equal(logits.argmax(-1) == targets)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, targets), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(make_model, kind):
    model, (ids, targets) = make_model(kind), batch()
    model(ids, targets).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_does_not_matter(make_model, kind):
    model, (ids, _) = make_model(kind), batch()
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 90
    before, after = model.logits(ids), model.logits(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:, :90], after[:, 10:, :90])


def test_names_and_storage_of_a_tied_head(make_model):
    model = make_model("tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names
    assert list(model.state_dict()) == names
    assert "lm_head.weight" in make_model("leviathan").state_dict()


def test_tie_survives_copies_loading_and_the_meta_device(make_model, make_config):
    model = make_model("tied")
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    with torch.device("meta"):
        empty = CausalLM(make_config("tied"))
    empty.to_empty(device="cpu")
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    empty.load_state_dict(model.state_dict())
    ids, targets = batch()
    assert empty(ids, targets).equal(model(ids, targets))
    low = model.bfloat16()
    assert low.lm_head.weight is low.model.embed_tokens.weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_backbone_equals_transformers_llama(make_model, kind, kv_heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = make_model(kind, n_kv_heads=kv_heads, d_ff=80, rope_theta=500.0, norm_eps=1e-4)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=16,
            rms_norm_eps=1e-4,
            rope_theta=500.0,
            tie_word_embeddings=kind == "tied",
        )
    )
    state = {n: p for n, p in model.state_dict().items() if "embed_tokens" not in n}
    state["model.embed_tokens.weight"] = model.model.embed_tokens.materialize()
    missing, unexpected = llama.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if kind == "tied" else set())
    llama.tie_weights()
    ids, _ = batch()
    with torch.no_grad():
        theirs = llama(ids).logits
    torch.testing.assert_close(
        model.logits(ids)[..., :90], theirs[..., :90], rtol=0, atol=LLAMA_TOLERANCE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_near_fp32_and_trains(make_model, kind):
    model, (ids, targets) = make_model(kind), batch()
    exact = model(ids, targets)
    low = model.bfloat16()(ids, targets)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, exact, rtol=5e-3, atol=0)
    low.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("kind", ["tied", "leviathan"])
def test_it_learns_a_short_text_by_heart(make_model, kind):
    model, (ids, targets) = make_model(kind), batch(rows=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    first = model(ids, targets).item()
    for _ in range(200):
        optimizer.zero_grad()
        model(ids, targets).backward()
        optimizer.step()
    assert model(ids, targets).item() < 0.05 * first
    assert bool(model.score(ids, targets).is_greedy[targets != IGNORE].all())
