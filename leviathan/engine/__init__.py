"""Training engines behind one protocol, and the factory that selects one."""

from collections.abc import Callable

from leviathan.config.plan import RunPlan
from leviathan.engine.base import Engine
from leviathan.model.transformer import CausalLM
from leviathan.parallel.mesh import Mesh


def build_engine(model_factory: Callable[[], CausalLM], plan: RunPlan, mesh: Mesh) -> Engine:
    """Builds the engine named in the configuration, including its model. Collective.

    Args:
        model_factory: builds the model with its initial weights, identical on every rank.
        plan: configuration and world size.
        mesh: the initialized process mesh.

    Raises:
        ConfigError: DeepSpeed keys in `engine.extra` contradict the plan, or
            `engine.dp_replicate` does not divide the number of data-parallel ranks.
    """
    if plan.config.engine.kind == "fsdp2":
        from leviathan.engine.fsdp2 import Fsdp2Engine

        return Fsdp2Engine(model_factory, plan, mesh)
    from leviathan.engine.deepspeed import DeepSpeedEngine  # takes seconds to import

    return DeepSpeedEngine(model_factory, plan, mesh)
