"""The checkpoints of a run: is there room, one try beforehand, and one save after another."""

import shutil
from contextlib import suppress
from typing import Any

from leviathan.checkpoint.handle import SaveHandle
from leviathan.checkpoint.retention import retention
from leviathan.checkpoint.save import save_checkpoint, try_saving
from leviathan.config.schema import RunConfig
from leviathan.console import say
from leviathan.engine.base import Engine
from leviathan.errors import CheckpointError
from leviathan.parallel.mesh import Mesh


class Saving:
    """Saves an engine, at most one checkpoint at a time; leaving the context waits for the last.

    Every method is collective.
    """

    def __init__(self, engine: Engine, config: RunConfig, mesh: Mesh) -> None:
        self._engine, self._config, self._mesh = engine, config, mesh
        self._last = SaveHandle(lambda: None, background=False)

    def __enter__(self) -> "Saving":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._last.wait()
        else:
            with suppress(Exception):  # the error that is on its way says more
                self._last.wait()

    @property
    def failed(self) -> bool:
        """True once the save in the background has failed on this rank; the next one raises it."""
        return self._last.failed

    def rehearse(self, resumed: bool) -> None:
        """Before the first step: is there room, and, if it never did, does a save go through?

        Raises:
            CheckpointError: not even one checkpoint can be written.
        """
        with self._mesh.together():
            if self._mesh.rank == 0:
                check_room(self._config, self._mesh.world_size)
        if not resumed:
            try_saving(self._config.run_dir, self._mesh, self._engine.save)

    def begin(self, state: dict[str, Any]) -> None:
        """Saves what the engine holds now, as soon as the former save is through.

        Raises:
            CheckpointError: one of the two failed.
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


def check_room(config: RunConfig, world_size: int = 1) -> None:
    """Holds the checkpoints that a run will keep against the free space of its disk.

    Raises:
        CheckpointError: there is no room for one.
    """
    plan = retention(config, world_size)
    size, wanted = plan.bytes_each, plan.bytes_needed
    free = shutil.disk_usage(config.run_dir).free
    if free < size:
        raise CheckpointError(
            "checkpoint.no_space",
            f"{config.run_dir}: {free / 1e6:,.1f} MB are free, but one checkpoint of this "
            f"model takes {size / 1e6:,.1f} MB: make room, or choose another run_dir",
        )
    if free < wanted:
        say(
            f"{config.run_dir}: the checkpoints to be kept at once will take "
            f"{wanted / 1e6:,.1f} MB (up to {plan.at_once} of {size / 1e6:,.1f} MB), but only "
            f"{free / 1e6:,.1f} MB are free: make room, or lower checkpoint.keep_last",
            style="yellow",
        )
