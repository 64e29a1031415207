"""Values derived from the configuration and the world size: batches per rank, and due events."""

from dataclasses import dataclass
from typing import Literal

from leviathan.config.run import RunConfig
from leviathan.errors import ConfigError

Event = Literal["log", "evaluate", "tasks", "checkpoint"]


@dataclass(frozen=True)
class RunPlan:
    """Derived values of a run; `config` is the configuration as written.

    Raises:
        ConfigError: the world size is incompatible with the configuration.
    """

    config: RunConfig
    world_size: int

    def __post_init__(self) -> None:
        tp, batch = self.config.parallel.tp, self.config.train.global_batch_size
        if self.world_size % tp:
            raise ConfigError(
                "parallel.indivisible",
                f"parallel.tp={tp} does not divide the {self.world_size} ranks: start a multiple "
                f"of {tp} ranks, or set parallel.tp to a divisor of {self.world_size}",
            )
        if batch < self.dp:
            raise ConfigError(
                "parallel.batch_too_small",
                f"train.global_batch_size={batch} sequences cannot be distributed over "
                f"{self.dp} data-parallel ranks: raise it to at least {self.dp}, or start fewer "
                "ranks",
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks."""
        return self.world_size // self.config.parallel.tp

    @property
    def rows_per_rank_max(self) -> int:
        """Maximum number of sequences of a global batch on any rank."""
        return -(-self.config.train.global_batch_size // self.dp)

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes per step, equal on all ranks."""
        return -(-self.rows_per_rank_max // self.config.train.micro_batch_size)

    def is_due(self, event: Event, step: int) -> bool:
        """Whether `event` is due after step `step` (counted from 1)."""
        train, tasks = self.config.train, self.config.evaluate
        if event == "tasks" and not tasks.tasks:
            return False
        every = {
            "log": train.log_every,
            "evaluate": train.eval_every,
            "tasks": tasks.every,
            "checkpoint": self.config.checkpoint.every,
        }[event]
        return step == train.steps or (every > 0 and step % every == 0)
