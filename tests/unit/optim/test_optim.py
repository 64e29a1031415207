import itertools
import math

import pytest
import torch
from errors import raises_error
from pydantic import ValidationError
from torch import nn

from leviathan.config.run import ModelConfig, OptimConfig
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
from leviathan.optim import (
    GuardedAdamW,
    build_optimizer,
    describe_groups,
    lr_at,
    param_roles,
    resolve_groups,
)


def test_warm_up_is_linear_and_reaches_the_peak():
    optim = OptimConfig(lr=1.0, warmup_steps=4)
    assert [lr_at(optim, 100, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_ends_at_its_ratio_and_halves_in_the_middle():
    optim = OptimConfig(lr=2.0, warmup_steps=0, final_lr_ratio=0.1)
    assert lr_at(optim, 101, 0) == 2.0
    assert lr_at(optim, 101, 50) == pytest.approx(1.1)
    assert lr_at(optim, 101, 100) == pytest.approx(0.2)
    rates = [lr_at(optim, 101, step) for step in range(101)]
    assert rates == sorted(rates, reverse=True)


def test_wsd_is_stable_and_then_falls_in_a_straight_line():
    optim = OptimConfig(lr=2.0, warmup_steps=5, schedule="wsd", decay_fraction=0.2)
    rates = [lr_at(optim, 100, step) for step in range(100)]
    assert rates[4:79] == [2.0] * 75
    assert rates[99] == pytest.approx(0.2)
    falls = [a - b for a, b in itertools.pairwise(rates[79:])]
    assert falls == pytest.approx([1.8 / 20] * 20)


def test_wsd_in_the_shortest_runs():
    assert lr_at(OptimConfig(lr=2.0, schedule="wsd"), 1, 0) == pytest.approx(0.2)
    long_decay = OptimConfig(lr=2.0, schedule="wsd", warmup_steps=2, decay_fraction=1.0)
    assert lr_at(long_decay, 4, 1) == 2.0
    assert lr_at(long_decay, 4, 2) == pytest.approx(1.1)


def test_constant_and_shortest_runs():
    assert lr_at(OptimConfig(lr=0.5, schedule="constant"), 10, 9) == 0.5
    assert lr_at(OptimConfig(lr=0.5), 1, 0) == 0.5
    assert math.isfinite(lr_at(OptimConfig(lr=0.5, warmup_steps=1), 2, 1))


LEVIATHAN = {"kind": "leviathan", "d_seed": 4, "heads": 2, "knots": 4, "rank": 3}


def causal_lm(kind="leviathan"):
    embedding = LEVIATHAN if kind == "leviathan" else {"kind": kind}
    model = CausalLM(
        ModelConfig(d_model=8, n_layers=2, n_heads=2, vocab_size=27, embedding=embedding)
    )
    init_weights(model, model.config, seed=1)
    return model


def test_a_decayed_step_shrinks_matrices_and_leaves_gains():
    model = causal_lm()
    optimizer = build_optimizer(model, OptimConfig(lr=0.5, weight_decay=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.set_lr(0.5)
    optimizer.clip([0.0])
    optimizer.step()
    roles = param_roles(model)
    for name, p in model.named_parameters():
        factor = 1.0 if roles[name] in ("gain", "bias") else 1 - 0.5 * 0.1
        assert torch.allclose(p, before[name] * factor), name
    assert {roles[f"model.embed_tokens.{n}"] for n in ("norm_weight", "latent_bias")} == {
        "gain", "bias"
    }  # fmt: skip


def test_the_first_group_that_matches_applies():
    optim = OptimConfig.model_validate(
        {
            "weight_decay": 0.1,
            "groups": [
                {"name": "*.q_proj.weight", "lr_scale": 3, "clip": 0.5},
                {"role": "matrix", "lr_scale": 2, "betas": [0.5, 0.6]},
                {"role": "gain", "weight_decay": 0.2},
                {"role": "table"},
            ],
        }
    )
    model = causal_lm()
    groups = {(g.selector, g.weight_decay): g for g in resolve_groups(model, optim)}
    q = groups["name=*.q_proj.weight", 0.1]
    assert set(q.roles) == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}
    assert (q.lr_scale, q.betas, q.clip) == (3, (0.9, 0.999), 0.5)
    matrix = groups["role=matrix", 0.1]
    assert "model.embed_tokens.out_weight" in matrix.roles
    assert (matrix.lr_scale, matrix.betas, matrix.clip) == (2, (0.5, 0.6), None)
    assert set(groups["role=gain", 0.2].roles.values()) == {"gain"}
    assert groups["default", 0.0].roles == {
        "model.embed_tokens.latent_bias": "bias", "model.embed_tokens.norm_bias": "bias"
    }  # fmt: skip
    listed = [name for g in groups.values() for name in g.roles]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    rows = describe_groups(model, optim)
    assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in model.parameters())
    (unused,) = [row for row in rows if not row["tensors"]]
    assert unused["selector"] == "role=table"
    assert [row["lr"] for row in rows if row["role"] == "spline"] == [1e-3]


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([{"name": "*.x_proj.weight"}], ("optim.invalid_group", "optim.groups.0", "x_proj")),
        ([{"role": "head"}, {"name": "lm_head.*"}], ("optim.invalid_group", "optim.groups.1")),
        ([{"role": "spline"}, {"role": "spline"}], ("optim.invalid_group", "optim.groups.1")),
    ],
)
def test_a_group_that_can_have_no_effect_is_refused(groups, named):
    with raises_error(*named):
        resolve_groups(causal_lm(), OptimConfig.model_validate({"groups": groups}))


@pytest.mark.parametrize("group", [{}, {"role": "head", "name": "lm_head.*"}, {"role": "heads"}])
def test_a_group_has_one_selector(group):
    with pytest.raises(ValidationError):
        OptimConfig.model_validate({"groups": [group]})


def test_a_module_without_roles_is_named():
    model = causal_lm()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match=r"extra\.weight"):
        param_roles(model)


def test_a_tied_parameter_is_in_one_group():
    groups = resolve_groups(causal_lm("tied"), OptimConfig())
    (role,) = [g.roles["model.embed_tokens.weight"] for g in groups]
    assert role == "table"
    assert not any("lm_head.weight" in g.roles for g in groups)


def small():
    """A model of one parameter group whose gradients are all ones."""
    model = causal_lm("untied")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


def test_veto_touches_neither_weights_nor_moments():
    model = small()
    optimizer = build_optimizer(model, OptimConfig())
    assert isinstance(optimizer, GuardedAdamW)
    optimizer.step()
    before = [p.clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.skip_step = True
    optimizer.step()
    for p, weight, moment in zip(model.parameters(), before, moments, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(optimizer.state[p]["exp_avg"], moment)
        assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize(("norm", "scale"), [(4.0, 0.25), (0.5, 1.0)])
def test_clip_scales_down_gradients_that_are_too_large_for_one_step(norm, scale):
    model = small()
    optimizer = build_optimizer(model, OptimConfig())
    optimizer.clip([norm])
    optimizer.step()
    for p in model.parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, torch.full_like(p, scale), rtol=1e-5)


def test_a_group_with_a_clip_has_its_own_norm():
    model = small()
    optim = OptimConfig.model_validate({"groups": [{"role": "head", "clip": 2.0}]})
    optimizer = build_optimizer(model, optim)
    assert optimizer.clip_count == 2
    assert optimizer.clip_index["lm_head.weight"] == 1
    assert optimizer.clip_index["model.norm.weight"] == 0
    optimizer.clip([0.5, 8.0])
    optimizer.step()
    for name, p in model.named_parameters():
        expected = 0.25 if name == "lm_head.weight" else 1.0
        assert torch.allclose(p.grad, torch.full_like(p, expected), rtol=1e-5), name
