"""Where checkpoints lie: run_dir/checkpoints/step-00000123, and which of them count."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from leviathan.checkpoint.manifest import MANIFEST, read_manifest
from leviathan.errors import CheckpointError

CHECKPOINTS = "checkpoints"
CONFIG, STATE = "config.yaml", "state.json"
_STEP = re.compile(r"step-(\d{8,})")


def step_dir(run_dir: Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return run_dir / CHECKPOINTS / f"step-{step:08d}"


def step_of(directory: Path) -> int:
    """The step a checkpoint folder is named after."""
    match = _STEP.fullmatch(directory.name)
    assert match, directory
    return int(match[1])


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first; anything without one does not exist."""
    folder = run_dir / CHECKPOINTS
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if _STEP.fullmatch(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(found, key=step_of)


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint a user means: a step's folder, a run, its `checkpoints`, or …/latest.

    Raises:
        CheckpointError: there is no complete checkpoint there.
    """
    path = Path(path)
    if path.name == "latest" and not path.exists():
        return resolve_checkpoint(path.parent)
    if _STEP.fullmatch(path.name):
        read_manifest(path) if path.is_dir() else _refuse(path, "no such checkpoint")
        return path
    run_dir = path.parent if path.name == CHECKPOINTS else path
    steps = complete_checkpoints(run_dir)
    if not steps:
        reason = "holds no complete checkpoint" if path.is_dir() else "no such folder"
        _refuse(path, f"{reason}; give a run folder or its checkpoints/step-XXXXXXXX")
    return steps[-1]


def _refuse(path: Path, reason: str) -> None:
    raise CheckpointError(f"{path}: {reason}")


def read_state(directory: Path) -> dict[str, Any]:
    """state.json of a checkpoint: step, tokens, seed, data fingerprint, …

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = directory / STATE
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: unreadable ({error})") from error


def prune(run_dir: Path, keep_last: int) -> None:
    """Removes all but the newest complete checkpoints; interrupted, it leaves no false one."""
    for directory in complete_checkpoints(run_dir)[:-keep_last]:
        (directory / MANIFEST).unlink()
        shutil.rmtree(directory, ignore_errors=True)


def remove_unfinished(run_dir: Path) -> None:
    """Clears what interrupted saves and removals left behind."""
    folder = run_dir / CHECKPOINTS
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        half_removed = _STEP.fullmatch(path.name) and not (path / MANIFEST).exists()
        if path.is_dir() and (half_removed or path.name.startswith(".saving-")):
            shutil.rmtree(path, ignore_errors=True)
