"""manifest.json: names, sizes and hashes of a checkpoint's files. Written last.

A checkpoint is complete if and only if it has a manifest.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leviathan.errors import CheckpointError
from leviathan.files import write_atomic

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
