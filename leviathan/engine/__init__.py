"""Training engines behind one protocol, and the one place where an engine is chosen."""

from collections.abc import Callable

from leviathan.config.plan import RunPlan
from leviathan.engine.base import Engine
from leviathan.model.transformer import CausalLM
from leviathan.parallel.mesh import Mesh


def build_engine(model_factory: Callable[[], CausalLM], plan: RunPlan, mesh: Mesh) -> Engine:
    """The engine that the configuration names, with the model inside. Collective.

    Args:
        model_factory: builds the model with its weights of step 0, the same on every rank.
        plan: configuration and world size.
        mesh: the ranks, already connected.

    Raises:
        ConfigError: further DeepSpeed keys (`engine.extra`) that contradict the plan, or a number
            of replicas that does not divide the ranks.
    """
    if plan.config.engine.kind == "fsdp2":
        from leviathan.engine.fsdp2 import Fsdp2Engine

        return Fsdp2Engine(model_factory, plan, mesh)
    from leviathan.engine.deepspeed import DeepSpeedEngine  # takes seconds to import

    return DeepSpeedEngine(model_factory, plan, mesh)
