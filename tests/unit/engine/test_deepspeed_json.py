import pytest
from errors import raises_error

from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig
from leviathan.engine.deepspeed import deepspeed_json


def plan(world_size=2, **engine):
    model = {"d_model": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 20, "seq_len": 4}
    config = {
        "run_dir": "run",
        "data": {"path": "data"},
        "model": {**model, "embedding": {"kind": "tied"}},
        "train": {"steps": 9, "global_batch_size": 10, "micro_batch_size": 2},
        "engine": {"kind": "deepspeed", **engine},
    }
    return RunPlan(RunConfig.model_validate(config), world_size)


def test_it_follows_from_the_plan():
    derived = deepspeed_json(plan(zero_stage=2, precision="bf16"))
    assert derived["zero_optimization"] == {
        "stage": 2,
        "round_robin_gradients": False,
        # All parameters: a table of 20 · 8, 16 · 8² in the block, three norms.
        "reduce_bucket_size": 20 * 8 + 16 * 64 + 3 * 8,
    }
    assert derived["gradient_accumulation_steps"] == 3  # 5 rows a rank, 2 at once
    assert derived["bf16"] == {"enabled": True}
    assert derived["data_types"] == {"grad_accum_dtype": "fp32"}


def test_the_users_keys_are_merged_in():
    extra = {
        "zero_optimization": {"reduce_bucket_size": 1000, "stage": 1},
        "wall_clock_breakdown": True,
        "steps_per_print": 5,
    }
    merged = deepspeed_json(plan(extra=extra))
    assert merged["zero_optimization"]["stage"] == 1
    assert merged["zero_optimization"]["reduce_bucket_size"] == 1000
    assert merged["wall_clock_breakdown"] is True
    assert merged["steps_per_print"] == 5
    assert merged["gradient_clipping"] == 0.0  # its default is 1, but AdamW clips already


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        (
            {"zero_optimization": {"stage": 3}},
            ("engine.derived_key", "engine.extra.zero_optimization.stage=3"),
        ),
        (
            {"gradient_clipping": 5.0},
            ("engine.derived_key", "gradient_clipping", "optim.grad_clip"),
        ),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            ("engine.derived_key", "round_robin_gradients=True"),
        ),
        ({"bf16": {"enabled": True}}, ("engine.derived_key", "engine.extra.bf16.enabled")),
        ({"bf16": True}, ("engine.derived_key", "engine.extra.bf16=True")),
        ({"optimizer": {"type": "Adam"}}, ("engine.derived_key", "engine.extra.optimizer")),
        ({"train_batch_size": 4}, ("engine.derived_key", "train.global_batch_size")),
        ({"steps_per_print": 0}, ("engine.invalid_extra", "engine.extra.steps_per_print=0")),
    ],
)
def test_a_contradiction_names_its_key(extra, names):
    with raises_error(*names):
        deepspeed_json(plan(extra=extra))
