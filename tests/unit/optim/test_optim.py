import itertools
import math

import pytest
import torch
from torch import nn

from leviathan.config.schema import OptimConfig
from leviathan.optim import GuardedAdamW, build_optimizer, lr_at, parameter_groups


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


def test_groups_hold_each_parameter_once_and_spare_gains_from_decay():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    assert len(parameter_groups(model, OptimConfig())) == 1
    groups = parameter_groups(model, OptimConfig(weight_decay=0.1))
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert [len(g["params"]) for g in groups] == [1, 3]


def test_a_tied_parameter_is_optimised_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert len(parameter_groups(model, OptimConfig())[0]["params"]) == 1


def test_veto_touches_neither_weights_nor_moments():
    model = nn.Linear(3, 1)
    optimizer = build_optimizer(model, OptimConfig())
    assert isinstance(optimizer, GuardedAdamW)
    model(torch.ones(3)).backward()
    optimizer.step()
    before = [p.clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.veto = True
    optimizer.step()
    for p, weight, moment in zip(model.parameters(), before, moments, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(optimizer.state[p]["exp_avg"], moment)
        assert optimizer.state[p]["step"] == 1


@pytest.mark.parametrize(("norm", "shrink"), [(4.0, 0.25), (0.5, 1.0)])
def test_clip_shrinks_gradients_that_are_too_large_for_one_step(norm, shrink):
    model = nn.Linear(3, 1)
    optimizer = build_optimizer(model, OptimConfig())
    gradients = [torch.randn_like(p) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient.clone()
    optimizer.clip(norm, highest=1.0)
    optimizer.step()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert p.grad is not None
        assert torch.allclose(p.grad, gradient * shrink, rtol=1e-5)
