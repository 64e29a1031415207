import math

import pytest

from leviathan.engine.base import StepStats
from leviathan.errors import LeviathanError
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
    assert "rows 41, 42" in capfd.readouterr().err
    with pytest.raises(LeviathanError, match=r"3 steps in a row \(optim\.max_skipped\)"):
        _warn_skipped(3, metrics, 3, rows=[41, 42])
    metrics.add(GOOD)
    metrics.add(BAD)
    _warn_skipped(5, metrics, 3, rows=[41, 42])
