"""What follows from a configuration and a world size."""

import pytest

from leviathan.config.plan import RunPlan
from leviathan.config.schema import RunConfig
from leviathan.errors import ConfigError

CONFIG = RunConfig.model_validate(
    {
        "run_dir": "runs/x",
        "data": {"path": "data/x"},
        "model": {
            "d_model": 8,
            "n_layers": 1,
            "n_heads": 2,
            "vocab_size": 10,
            "embedding": {"kind": "tied"},
        },
        "train": {
            "steps": 25,
            "global_batch_size": 7,
            "micro_batch_size": 2,
            "log_every": 10,
            "eval_every": 0,
        },
        "checkpoint": {"every": 5},
    }
)


@pytest.mark.parametrize(
    ("world", "rows", "micro_batches"), [(1, 7, 4), (2, 4, 2), (3, 3, 2), (7, 1, 1)]
)
def test_any_world_size_cuts_the_batch(world, rows, micro_batches):
    plan = RunPlan(CONFIG, world)
    assert (plan.dp, plan.rows_per_rank_max, plan.micro_batches) == (world, rows, micro_batches)


def test_more_ranks_than_sequences():
    with pytest.raises(ConfigError, match="raise it to at least 8"):
        RunPlan(CONFIG, 8)


def test_events_are_due_on_their_multiples_and_at_the_end():
    plan = RunPlan(CONFIG, 1)
    due = {e: [s for s in range(1, 26) if plan.is_due(e, s)] for e in ("log", "evaluate")}
    assert due == {"log": [10, 20, 25], "evaluate": [25]}
    assert [s for s in range(1, 26) if plan.is_due("checkpoint", s)] == [5, 10, 15, 20, 25]
