"""The checkpoints of a run: disk space check, trial save, and consecutive saves."""

import shutil
from contextlib import suppress
from typing import Any

from leviathan.checkpoint.store import SaveFuture, retention, save_checkpoint, try_saving
from leviathan.config.run import RunConfig
from leviathan.console import say
from leviathan.engine.base import Engine
from leviathan.errors import CheckpointError
from leviathan.formatting import format_bytes
from leviathan.parallel.mesh import Mesh


class CheckpointManager:
    """Saves an engine, one checkpoint at a time. All methods are collective.

    Leaving the context waits for the last save.
    """

    def __init__(self, engine: Engine, config: RunConfig, mesh: Mesh) -> None:
        self._engine, self._config, self._mesh = engine, config, mesh
        self._last = SaveFuture(lambda: None, background=False)

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._last.wait()
        else:
            with suppress(Exception):  # keeps the original error
                self._last.wait()

    @property
    def failed(self) -> bool:
        """True once the asynchronous save has failed on this rank; the next save raises it."""
        return self._last.failed

    def check_space(self, resumed: bool) -> None:
        """Checks the disk space before the first step, and tests a save unless the run resumed.

        Raises:
            CheckpointError: a checkpoint cannot be written.
        """
        with self._mesh.sync_errors():
            if self._mesh.rank == 0:
                check_disk_space(self._config, self._mesh.world_size)
        if not resumed:
            try_saving(self._config.run_dir, self._mesh, self._engine.save)

    def save(self, state: dict[str, Any]) -> None:
        """Starts saving the engine's current state, after waiting for the previous save.

        Raises:
            CheckpointError: one of the two saves failed.
        """
        self._last.wait()
        full = {
            **state,
            "optimizer_steps": self._engine.optimizer_steps,
            "position": state["step"] * self._config.train.global_batch_size,
            "seed": self._config.seed,
            "world_size": self._mesh.world_size,
        }
        self._last = save_checkpoint(self._config, self._mesh, full, self._engine.save)


def check_disk_space(config: RunConfig, world_size: int = 1) -> None:
    """Compares the size of the checkpoints that a run keeps with the free disk space.

    Raises:
        CheckpointError: one checkpoint does not fit.
    """
    plan = retention(config, world_size)
    size, needed = plan.bytes_each, plan.bytes_needed
    free = shutil.disk_usage(config.run_dir).free
    if free < size:
        raise CheckpointError(
            "checkpoint.no_space",
            f"{config.run_dir}: {format_bytes(free)} are free, but one checkpoint of this "
            f"model takes {format_bytes(size)}. Free disk space, or choose another run_dir",
        )
    if free < needed:
        say(
            f"warning: {config.run_dir}: the checkpoints to be kept at once will take "
            f"{format_bytes(needed)} (up to {plan.at_once} of {format_bytes(size)}), but only "
            f"{format_bytes(free)} are free. Free disk space, or lower checkpoint.keep_last",
            style="yellow",
        )
