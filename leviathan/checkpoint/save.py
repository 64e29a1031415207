"""One checkpoint, written so that it either exists whole or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from leviathan.checkpoint.handle import SaveHandle
from leviathan.checkpoint.layout import SAVING, draft_dir, prune, set_aside, step_dir
from leviathan.checkpoint.manifest import (
    CONFIG,
    STATE,
    file_names,
    fingerprint,
    write_json,
    write_manifest,
)
from leviathan.config.load import dump_config
from leviathan.config.schema import RunConfig
from leviathan.data.dataset import save_tokenizer
from leviathan.errors import CheckpointError
from leviathan.parallel.mesh import Mesh


def save_checkpoint(
    config: RunConfig,
    mesh: Mesh,
    state: dict[str, Any],
    write_tensors: Callable[[Path], SaveHandle],
) -> SaveHandle:
    """Writes run_dir/checkpoints/step-XXXXXXXX. Collective; `state["step"]` names it.

    Everything goes into a temporary folder: tensors by every rank, then state, configuration and
    tokenizer, then the manifest, then one rename. Only one save at a time: wait for the former.

    Args:
        config: the run, which is copied into the checkpoint; `checkpoint.background` says whether
            this returns before all is written.
        mesh: the ranks that write.
        state: what state.json shall hold.
        write_tensors: collective; begins to write this run's weights and moments into a folder.

    Returns:
        What to wait for.

    Raises:
        CheckpointError: (here or in waiting) the disk is full or a file cannot be written; older
            checkpoints stay.
    """
    final = step_dir(config.run_dir, state["step"])
    draft = draft_dir(config.run_dir, state["step"])
    with _or_nothing(draft, mesh):
        _begin(draft, mesh)
        tensors = write_tensors(draft)

    def finish() -> None:
        with _or_nothing(draft, mesh):
            tensors.wait()
            _finish(draft, final, config, mesh.apart, state)

    return SaveHandle(finish, config.checkpoint.background)


def try_saving(run_dir: Path, mesh: Mesh, write_tensors: Callable[[Path], SaveHandle]) -> None:
    """Writes the tensors of a checkpoint and removes them again. Collective.

    Raises:
        CheckpointError: they cannot be written, so that a run need not find out hours later.
    """
    draft = draft_dir(run_dir, 0)
    with _or_nothing(draft, mesh):
        _begin(draft, mesh)
        write_tensors(draft).wait()
    if mesh.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # not empty
            draft.parent.rmdir()


def _begin(draft: Path, mesh: Mesh) -> None:
    with mesh.together():
        if mesh.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)


def _finish(draft: Path, final: Path, config: RunConfig, mesh: Mesh, state: dict[str, Any]) -> None:
    """Everything but the tensors."""
    with mesh.together():
        if mesh.rank == 0:
            _write_small_files(draft, config, state)
    with mesh.together():
        entries = fingerprint(draft, file_names(draft)[mesh.rank :: mesh.world_size])
    shares = mesh.gather(entries)
    with mesh.together():
        if mesh.rank == 0:
            write_manifest(draft, {k: v for share in shares for k, v in sorted(share.items())})
            _commit(draft, final)
            prune(config.run_dir, config.checkpoint, state["step"])


@contextmanager
def _or_nothing(draft: Path, mesh: Mesh) -> Iterator[None]:
    """What fails leaves no draft behind, and is one message."""
    try:
        yield
    except Exception as error:
        if mesh.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        final = draft.with_name(draft.name.removeprefix(SAVING))
        raise CheckpointError(
            "checkpoint.save_failed",
            f"{final}: could not be saved ({error}); the checkpoints before it are untouched "
            f"({shutil.disk_usage(final.parent.parent).free / 1e6:,.1f} MB are free there)",
        ) from error


def _write_small_files(draft: Path, config: RunConfig, state: dict[str, Any]) -> None:
    write_json(draft / STATE, state)
    (draft / CONFIG).write_text(dump_config(config))
    save_tokenizer(config.data, draft)


def _commit(draft: Path, final: Path) -> None:
    """The rename that makes a checkpoint exist."""
    if final.exists():
        # Nobody else writes here: what stands in the way appeared during the run.
        set_aside(final)
    draft.rename(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
