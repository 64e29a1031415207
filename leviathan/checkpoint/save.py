"""Saving a checkpoint atomically: it is either complete or does not exist."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from leviathan.checkpoint.layout import SAVING, prune, quarantine, staging_dir, step_dir
from leviathan.checkpoint.manifest import (
    CONFIG,
    STATE,
    file_names,
    fingerprint,
    write_json,
    write_manifest,
)
from leviathan.checkpoint.save_future import SaveFuture
from leviathan.config.load import dump_config
from leviathan.config.schema import RunConfig
from leviathan.data.dataset import save_tokenizer
from leviathan.errors import CheckpointError
from leviathan.formatting import format_bytes
from leviathan.parallel.mesh import Mesh


def save_checkpoint(
    config: RunConfig,
    mesh: Mesh,
    state: dict[str, Any],
    write_tensors: Callable[[Path], SaveFuture],
) -> SaveFuture:
    """Writes run_dir/checkpoints/step-XXXXXXXX, where `state["step"]` is the step. Collective.

    All files are written to a staging directory: tensors by every rank, then state, configuration
    and tokenizer, then the manifest; then the directory is renamed. Only one save may run at a
    time: wait for the previous one first.

    Args:
        config: run configuration, which is copied into the checkpoint. With
            `checkpoint.async_save` the save is asynchronous.
        mesh: the process mesh.
        state: content of state.json.
        write_tensors: collective; starts writing weights and moments into a directory.

    Returns:
        The handle to wait for.

    Raises:
        CheckpointError: the disk is full or a file cannot be written; raised here or by the
            handle. Older checkpoints are unchanged.
    """
    final = step_dir(config.run_dir, state["step"])
    draft = staging_dir(config.run_dir, state["step"])
    with _discarded_on_error(draft, mesh):
        _make_staging(draft, mesh)
        tensors = write_tensors(draft)

    def finish() -> None:
        with _discarded_on_error(draft, mesh):
            tensors.wait()
            _finish(draft, final, config, mesh.checkpoint_group, state)

    return SaveFuture(finish, config.checkpoint.async_save)


def try_saving(run_dir: Path, mesh: Mesh, write_tensors: Callable[[Path], SaveFuture]) -> None:
    """Writes the tensors of a checkpoint and deletes them, as a test before training. Collective.

    Raises:
        CheckpointError: the tensors cannot be written.
    """
    draft = staging_dir(run_dir, 0)
    with _discarded_on_error(draft, mesh):
        _make_staging(draft, mesh)
        write_tensors(draft).wait()
    if mesh.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # not empty
            draft.parent.rmdir()


def _make_staging(draft: Path, mesh: Mesh) -> None:
    with mesh.sync_errors():
        if mesh.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)


def _finish(draft: Path, final: Path, config: RunConfig, mesh: Mesh, state: dict[str, Any]) -> None:
    """Writes all other files and the manifest, and renames the staging directory."""
    with mesh.sync_errors():
        if mesh.rank == 0:
            _write_small_files(draft, config, state)
    with mesh.sync_errors():
        entries = fingerprint(draft, file_names(draft)[mesh.rank :: mesh.world_size])
    shares = mesh.gather(entries)
    with mesh.sync_errors():
        if mesh.rank == 0:
            write_manifest(draft, {k: v for share in shares for k, v in sorted(share.items())})
            commit(draft, final)
            prune(config.run_dir, config.checkpoint, state["step"])


@contextmanager
def _discarded_on_error(draft: Path, mesh: Mesh) -> Iterator[None]:
    """On an error, deletes the staging directory and raises one CheckpointError."""
    try:
        yield
    except Exception as error:
        if mesh.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        final = draft.with_name(draft.name.removeprefix(SAVING))
        raise CheckpointError(
            "checkpoint.save_failed",
            f"{final}: could not be saved ({error}); earlier checkpoints are unchanged "
            f"({format_bytes(shutil.disk_usage(final.parent.parent).free)} free on this disk)",
        ) from error


def _write_small_files(draft: Path, config: RunConfig, state: dict[str, Any]) -> None:
    write_json(draft / STATE, state)
    (draft / CONFIG).write_text(dump_config(config))
    save_tokenizer(config.data, draft)


def commit(draft: Path, final: Path) -> None:
    """Renames a staging directory to a checkpoint; an existing directory is renamed first."""
    if final.exists():
        # The run directory is locked, so this directory was created from outside during the run.
        quarantine(final)
    draft.rename(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
