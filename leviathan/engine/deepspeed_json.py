"""The DeepSpeed configuration: derived from the plan, merged with the keys of `engine.extra`."""

import copy
from typing import Any

from leviathan.config.plan import RunPlan
from leviathan.config.schema import DeepSpeedConfig
from leviathan.errors import ConfigError
from leviathan.model.parallel_layout import reduce_bucket

# DeepSpeed keys that are derived from our configuration → the key to set instead.
RESERVED = {
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "fp16": "engine.precision",
    "amp": "engine.precision",
    "torch_autocast": "engine.precision",
    "train_batch_size": "train.global_batch_size",
    "gradient_clipping": "optim.grad_clip",
    "tensor_parallel": "parallel.tp",
    "managed_gradient_accumulation": "train.micro_batch_size",
}


def deepspeed_json(plan: RunPlan) -> dict[str, Any]:
    """Builds the complete DeepSpeed configuration of a run.

    Raises:
        ConfigError: a key of `engine.extra` contradicts a value derived from the plan, or is
            invalid.
    """
    engine = plan.config.engine
    assert isinstance(engine, DeepSpeedConfig)
    derived: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.config.train.micro_batch_size,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": 0.0,  # AdamW clips: its norm handles tensor-parallel ranks correctly
        # The saved shards assume partitions in parameter order.
        "zero_optimization": {"stage": engine.zero_stage, "round_robin_gradients": False},
        "zero_allow_untested_optimizer": True,  # torch's AdamW that can skip a step
        "communication_data_type": "fp32",
        "bf16": {"enabled": engine.precision == "bf16"},
    }
    if engine.precision == "bf16" and engine.zero_stage > 0:
        # Stage 0 has no fp32 accumulation of bf16 gradients.
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
    if engine.offload_optimizer:
        derived["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        derived["zero_force_ds_cpu_optimizer"] = False  # see zero_allow_untested_optimizer
    for key, instead in RESERVED.items():
        if key in engine.extra:
            raise ConfigError(
                "engine.derived_key",
                f"engine.extra.{key}: this key is derived from the configuration. Set {instead} "
                "instead",
            )
    merged = copy.deepcopy(derived)
    merged["steps_per_print"] = 2**31 - 1
    # DeepSpeed allocates the full bucket, regardless of the model's size.
    merged["zero_optimization"]["reduce_bucket_size"] = reduce_bucket(plan.config.model)
    _merge(merged, engine.extra, derived, "engine.extra")
    every = merged["steps_per_print"]
    if type(every) is not int or every < 1:
        raise ConfigError(
            "engine.invalid_extra",
            f"engine.extra.steps_per_print={every!r}: expected an integer of at least 1",
        )
    return merged


def _merge(into: dict[str, Any], extra: dict[str, Any], derived: Any, path: str) -> None:
    for key, value in extra.items():
        fixed = derived.get(key) if isinstance(derived, dict) else None
        if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(key, {}), value, fixed, f"{path}.{key}")
        elif fixed is not None and fixed != value:
            raise ConfigError(
                "engine.derived_key",
                f"{path}.{key}={value!r}: this value is derived from the rest of the configuration "
                f"as {fixed!r}. Remove the key, or change the configuration",
            )
        else:
            into[key] = copy.deepcopy(value)
