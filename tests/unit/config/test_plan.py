"""What follows from a configuration and a world size."""

import pytest
from errors import raises_error

from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig

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
    with raises_error("parallel.batch_too_small"):
        RunPlan(CONFIG, 8)


def test_events_are_due_on_their_multiples_and_at_the_end():
    plan = RunPlan(CONFIG, 1)
    due = {e: [s for s in range(1, 26) if plan.is_due(e, s)] for e in ("log", "evaluate")}
    assert due == {"log": [10, 20, 25], "evaluate": [25]}
    assert [s for s in range(1, 26) if plan.is_due("checkpoint", s)] == [5, 10, 15, 20, 25]


LEV = {"kind": "leviathan", "d_seed": 8, "heads": 6, "tp_mode": "heads"}


def with_tp(tp, embedding=LEV, **shape):
    run = CONFIG.model_dump(mode="json")
    model = {"d_model": 48, "n_layers": 1, "n_heads": 12, "n_kv_heads": 6, "vocab_size": 50}
    model |= {"padded_vocab_size": 60, "embedding": embedding, **shape}
    return RunConfig.model_validate({**run, "model": model, "parallel": {"tp": tp}})


def test_tensor_parallel_ranks_are_no_data_parallel_ones():
    plan = RunPlan(with_tp(3), 6)
    assert (plan.dp, plan.rows_per_rank_max, plan.micro_batches) == (2, 4, 2)
    with raises_error("parallel.indivisible", "parallel.tp=3"):
        RunPlan(with_tp(3), 4)


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"n_kv_heads": 2}, r"model\.n_kv_heads \(2\): set parallel\.tp to one of 1, 2, or"),
        ({"n_heads": 8, "n_kv_heads": 8}, r"model\.n_heads \(8\), model\.n_kv_heads \(8\): set"),
        ({"d_ff": 64}, r"model\.d_ff \(64\)"),
        ({"padded_vocab_size": 64}, r"model\.padded_vocab_size \(64\): .* multiples of 3"),
        ({"embedding": {**LEV, "heads": 8}}, r"model\.embedding\.heads \(8\)"),
    ],
)
def test_what_tensor_parallelism_cuts_it_must_divide(shape, named):
    with pytest.raises(ValueError, match=rf"parallel\.tp=3 does not divide {named}"):
        with_tp(3, **shape)


def test_heads_of_lev_matter_only_where_they_are_cut():
    assert with_tp(3, {**LEV, "heads": 8, "tp_mode": "ids"}).parallel.tp == 3
