"""Files and directories of a checkpoint, run_dir/checkpoints/step-00000123.

manifest.json has the names, sizes and hashes of its files and is written last: a checkpoint is
complete if and only if it has a manifest.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from leviathan.config.run import CheckpointConfig
from leviathan.console import say
from leviathan.errors import CheckpointError
from leviathan.files import read_json, write_atomic

# ---------------------------------------------------------------- manifest

MANIFEST, CONFIG, STATE = "manifest.json", "config.yaml", "state.json"
RUN = "run.json"  # next to config.yaml in a run directory
# A manifest that does not list these is invalid.
REQUIRED = (CONFIG, STATE, ".metadata")


def file_names(directory: Path) -> list[str]:
    """The relative paths of all files of a checkpoint except the manifest, sorted."""
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and path.name != MANIFEST
    )


def fingerprint(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of the named files."""
    entries = {}
    for name in names:
        with (directory / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries[name] = {"bytes": (directory / name).stat().st_size, "sha256": digest}
    return entries


def write_manifest(directory: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Writes the manifest durably."""
    write_json(directory / MANIFEST, {"files": entries})


def read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    """Reads the manifest: file name → {bytes, sha256}.

    Raises:
        CheckpointError: it is missing (an incomplete checkpoint) or corrupt.
    """
    path = directory / MANIFEST
    try:
        entries = json.loads(path.read_text())["files"]
        for entry in entries.values():
            if not (isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)):
                raise TypeError("expected integer sizes and string hashes")
    except FileNotFoundError:
        raise CheckpointError(
            "checkpoint.incomplete",
            f"{directory}: {MANIFEST} is missing: the checkpoint is incomplete. Use another one",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            "checkpoint.corrupt", f"{path}: corrupt ({type(error).__name__}: {error})"
        ) from error
    tensors = [file.name for file in directory.glob("*.distcp")]
    unlisted = [name for name in (*REQUIRED, *sorted(tensors)) if name not in entries]
    if unlisted:
        raise CheckpointError(
            "checkpoint.corrupt", f"{path}: corrupt: it does not list {', '.join(unlisted)}"
        )
    return entries


def verify_manifest(directory: Path, share: int = 0, shares: int = 1) -> int:
    """Verifies the sizes and hashes of a checkpoint's files.

    Each rank checks all sizes and hashes part `share` of `shares`.

    Returns:
        The number of files that the manifest lists.

    Raises:
        CheckpointError: a file is missing, has another size, or has changed; the message names the
            first one.
    """
    entries = read_manifest(directory)
    for name, entry in entries.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(
                "checkpoint.corrupt", f"{path}: missing, although the manifest lists it"
            )
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                "checkpoint.corrupt",
                f"{path}: corrupt: expected {entry['bytes']:,} bytes, found "
                f"{path.stat().st_size:,}",
            )
    for name in sorted(entries)[share::shares]:
        if fingerprint(directory, [name])[name] != entries[name]:
            raise CheckpointError(
                "checkpoint.corrupt",
                f"{directory / name}: corrupt: its SHA-256 differs from the manifest",
            )
    return len(entries)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically and durably."""
    write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())


# ---------------------------------------------------------------- directories

CHECKPOINTS = "checkpoints"
EVALUATION = "evaluation"
SAVING, _REMOVING, _CORRUPT = ".saving-", ".removing-", "corrupt-"
_STEP = re.compile(r"step-(\d{8,})")


def step_dir(run_dir: Path, step: int) -> Path:
    """The directory of one checkpoint."""
    return run_dir / CHECKPOINTS / step_name(step)


def evaluation_dir(run_dir: Path, step: int) -> Path:
    """The directory of the evaluations of one checkpoint."""
    return run_dir / EVALUATION / step_name(step)


def step_name(step: int) -> str:
    """The name of the directories of one step: step-00000123."""
    return f"step-{step:08d}"


def step_of(directory: Path) -> int:
    """The step in the name of a checkpoint or evaluation directory."""
    match = _STEP.fullmatch(directory.name)
    assert match, directory
    return int(match[1])


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first; a directory without one is incomplete."""
    folder = run_dir / CHECKPOINTS
    found = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if _STEP.fullmatch(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(found, key=step_of)


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint at a path: a step's directory, a run, its `checkpoints`, or …/latest.

    Raises:
        CheckpointError: the path contains no complete checkpoint.
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
        reason = (
            "no complete checkpoint in this directory" if path.is_dir() else "no such directory"
        )
        _refuse(path, f"{reason}; expected a run directory or its checkpoints/step-XXXXXXXX")
    return steps[-1]


def _refuse(path: Path, reason: str) -> None:
    raise CheckpointError("checkpoint.not_found", f"{path}: {reason}")


def read_state(directory: Path, **keys: type) -> dict[str, Any]:
    """Reads state.json of a checkpoint: step, tokens, seed, data fingerprint, …

    Args:
        directory: the checkpoint.
        keys: required key → type of its value. Integers are non-negative counts.

    Raises:
        CheckpointError: it is missing or corrupt, or its step differs from the step in the name of
            the directory.
    """
    path = directory / STATE
    state = read_json(path, "checkpoint.corrupt", error=CheckpointError)
    named = _STEP.fullmatch(directory.name)
    if named or "step" in state:
        keys = {"step": int, **keys}
    for key, kind in keys.items():
        value = state.get(key)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            expected = "a non-negative integer" if kind is int else f"a {kind.__name__}"
            raise CheckpointError(
                "checkpoint.corrupt", f"{path}: corrupt: {key} is {value!r}, expected {expected}"
            )
    if named and int(named[1]) != state["step"]:
        raise CheckpointError(
            "checkpoint.renamed",
            f"{path}: step is {state['step']}, but the directory is {directory.name}: rename the "
            "directory or restore its original state.json",
        )
    return state


def staging_dir(run_dir: Path, step: int) -> Path:
    """The staging directory in which a checkpoint is written before it is renamed."""
    final = step_dir(run_dir, step)
    return final.with_name(SAVING + final.name)


def superseded(steps: Sequence[int], keep: CheckpointConfig) -> list[int]:
    """The steps to delete, given the steps of all complete checkpoints, oldest first."""
    return [
        step
        for step in steps[: -keep.keep_last]
        if not (keep.keep_every and step % keep.keep_every == 0)
    ]


def prune(run_dir: Path, keep: CheckpointConfig, step: int) -> None:
    """Deletes the complete checkpoints up to `step` that are superseded.

    The latest `keep_last` checkpoints and those of every `keep_every`-th step are kept. An
    interruption leaves no partial checkpoint. Checkpoints of later steps do not belong to this run:
    they are neither counted nor deleted.
    """
    ours = [path for path in complete_checkpoints(run_dir) if step_of(path) <= step]
    gone = set(superseded([step_of(path) for path in ours], keep))
    for directory in (path for path in ours if step_of(path) in gone):
        going = directory.with_name(_REMOVING + directory.name)
        shutil.rmtree(going, ignore_errors=True)
        directory.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def quarantine(directory: Path) -> None:
    """Renames an unusable checkpoint to corrupt-… and reports it; deletes nothing."""
    name, number = _CORRUPT + directory.name, 1
    while (aside := directory.with_name(name)).exists():
        number += 1
        name = f"{_CORRUPT}{directory.name}-{number}"
    directory.rename(aside)
    say(
        f"{directory}: incomplete, corrupt, or of a later step; renamed to {name}. Delete it if "
        "you do not need it",
        style="yellow",
    )


def clean_up(run_dir: Path, step: int) -> None:
    """Prepares the checkpoints directory for resuming from `step`.

    Deletes staging directories and partly deleted checkpoints, and renames the checkpoints from
    which the run cannot resume.

    Raises:
        CheckpointError: the directory is not writable.
    """
    folder = run_dir / CHECKPOINTS
    whole = {path.name for path in complete_checkpoints(run_dir) if step_of(path) <= step}
    try:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.name.startswith((SAVING, _REMOVING)):
                shutil.rmtree(path, ignore_errors=True)
            elif _STEP.fullmatch(path.name) and path.name not in whole:
                quarantine(path)
    except OSError as error:
        raise CheckpointError(
            "checkpoint.cleanup_failed",
            f"{folder}: cannot delete or rename unusable checkpoints ({error}). Make the directory "
            "writable",
        ) from error
