"""DeepSpeed's JSON: derived from the plan, with the user's further keys merged in."""

import copy
from typing import Any

from leviathan.config.plan import RunPlan
from leviathan.config.schema import DeepSpeedConfig
from leviathan.errors import ConfigError
from leviathan.model.parallel_layout import reduce_bucket

# Keys that would take over what the rest of the program decides: → where to say it instead.
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
    """The whole DeepSpeed configuration of a run.

    Raises:
        ConfigError: a key of `engine.extra` contradicts what follows from the plan, or cannot be.
    """
    engine = plan.config.engine
    assert isinstance(engine, DeepSpeedConfig)
    derived: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.config.train.micro_batch_size,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": 0.0,  # AdamW clips: its norm counts tensor-parallel ranks rightly
        # Partitions in another order would be read and saved wrongly.
        "zero_optimization": {"stage": engine.zero_stage, "round_robin_gradients": False},
        "zero_allow_untested_optimizer": True,  # ours is torch's AdamW with a veto
        "communication_data_type": "fp32",
        "bf16": {"enabled": engine.precision == "bf16"},
    }
    if engine.precision == "bf16" and engine.zero_stage > 0:
        # Stage 0 has no fp32 accumulation of bf16 gradients.
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
    if engine.offload_optimizer:
        derived["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        derived["zero_force_ds_cpu_optimizer"] = False  # as untested as above
    for key, instead in RESERVED.items():
        if key in engine.extra:
            raise ConfigError(
                "engine.derived_key",
                f"engine.extra.{key}: this follows from the configuration; set {instead} instead",
            )
    merged = copy.deepcopy(derived)
    merged["steps_per_print"] = 2**31 - 1
    # DeepSpeed allocates the whole bucket, however small the model.
    merged["zero_optimization"]["reduce_bucket_size"] = reduce_bucket(plan.config.model)
    _merge(merged, engine.extra, derived, "engine.extra")
    every = merged["steps_per_print"]
    if type(every) is not int or every < 1:
        raise ConfigError(
            "engine.invalid_extra",
            f"engine.extra.steps_per_print={every!r}: expected a whole number from 1",
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
                f"{path}.{key}={value!r} contradicts {fixed!r}, which follows from the rest of the "
                "configuration: change it there",
            )
        else:
            into[key] = copy.deepcopy(value)
