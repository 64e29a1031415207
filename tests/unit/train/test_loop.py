import itertools
import math

import pytest
import torch
from errors import raises_error

from leviathan.checkpoint.layout import complete_checkpoints
from leviathan.engine.base import StepStats
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
from leviathan.parallel.mesh import leave_mesh
from leviathan.train.loop import _warn_skipped
from leviathan.train.metrics import Metrics

BAD = StepStats(loss=math.nan, grad_norm=math.inf, tokens=10, skipped=True)
GOOD = StepStats(loss=1.0, grad_norm=1.0, tokens=10, skipped=False)


def test_a_run_that_skips_every_step_ends_and_names_rows(tmp_path, capfd):
    metrics = Metrics(tmp_path / "metrics.jsonl", 0, 0, 0, 6.0, 1, writes=True)
    for step in range(1, 4):
        metrics.add(BAD)
        if step < 3:
            _warn_skipped(step, metrics, 3, rows=[41, 42])
    assert "samples 41, 42" in capfd.readouterr().err
    with raises_error("train.too_many_skips", "optim.max_consecutive_skips", "3 "):
        _warn_skipped(3, metrics, 3, rows=[41, 42])
    metrics.add(GOOD)
    metrics.add(BAD)
    _warn_skipped(5, metrics, 3, rows=[41, 42])


@pytest.fixture
def poisoned(monkeypatch):
    """A function: makes the training loss NaN in the forward passes from `first` to `last`."""
    forward, count = CausalLM.forward, itertools.count()

    def poison(first=0, last=10**9):
        def bad(model, *args, **kwargs):
            result = forward(model, *args, **kwargs)
            training = isinstance(result, torch.Tensor) and result.requires_grad
            return result * math.nan if training and first <= next(count) <= last else result

        monkeypatch.setattr(CausalLM, "forward", bad)

    return poison


def test_a_run_whose_every_step_was_skipped_fails(run_config, trained, poisoned, capfd):
    poisoned()
    config = run_config(steps=3, checkpoint={"every": 1})
    with raises_error("train.all_steps_skipped", config.run_dir, "all 3 ", "optim.lr"):
        trained(config)
    leave_mesh()
    assert "complete" not in capfd.readouterr().err
    assert [path.name for path in complete_checkpoints(config.run_dir)][-1] == "step-00000002"
    with raises_error("train.all_steps_skipped", "all 3 "):
        trained(config)  # resumed from step 2


def test_one_update_is_enough_and_skipped_last_steps_are_warned_of(
    run_config, trained, poisoned, capfd
):
    poisoned(first=2)  # two micro-batches: from the second step on
    log = trained(run_config(steps=3))
    assert [line["skipped"] for line in log if "skipped" in line] == [0, 1, 2]
    shown = " ".join(capfd.readouterr().err.split())
    assert "complete at step 3 (2 steps skipped)" in shown
    assert "warning: the last 2 step(s) were skipped" in shown


def test_nan_inside_lev_reaches_the_check_for_non_finite_losses(run_config, trained, monkeypatch):
    def with_nan(model, config, seed):
        init_weights(model, config, seed)
        model.model.embed_tokens.codebooks.data[:, 0] = math.nan

    monkeypatch.setattr("leviathan.train.loop.init_weights", with_nan)
    lev = {"kind": "leviathan", "d_seed": 4, "heads": 2, "knots": 4, "rank": 3}
    config = run_config(steps=2, model={"embedding": lev})
    with raises_error("train.all_steps_skipped", "all 2 "):
        trained(config)
