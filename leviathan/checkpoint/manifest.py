"""manifest.json: names, sizes and hashes of a checkpoint's files. Written last, it is the proof."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leviathan.errors import CheckpointError
from leviathan.files import write_atomic

MANIFEST, CONFIG, STATE = "manifest.json", "config.yaml", "state.json"
RUN = "run.json"  # beside config.yaml in a run folder
# A manifest that does not list these proves nothing.
REQUIRED = (CONFIG, STATE, ".metadata")


def file_names(directory: Path) -> list[str]:
    """Every file of a checkpoint but the manifest, relative and in order."""
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and path.name != MANIFEST
    )


def fingerprint(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the named files."""
    entries = {}
    for name in names:
        with (directory / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries[name] = {"bytes": (directory / name).stat().st_size, "sha256": digest}
    return entries


def write_manifest(directory: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Writes the manifest and sees it onto the disk."""
    write_json(directory / MANIFEST, {"files": entries})


def read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    """File name → {bytes, sha256}.

    Raises:
        CheckpointError: there is none (a half-written checkpoint), or it is not one that
            `write_manifest` wrote.
    """
    path = directory / MANIFEST
    try:
        entries = json.loads(path.read_text())["files"]
        for entry in entries.values():
            if not (isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)):
                raise TypeError("sizes are numbers, hashes are texts")
    except FileNotFoundError:
        raise CheckpointError(
            "checkpoint.incomplete", f"{directory}: no {MANIFEST}: not a finished checkpoint"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            "checkpoint.corrupt", f"{path}: damaged ({type(error).__name__}: {error})"
        ) from error
    tensors = [file.name for file in directory.glob("*.distcp")]
    unlisted = [name for name in (*REQUIRED, *sorted(tensors)) if name not in entries]
    if unlisted:
        raise CheckpointError(
            "checkpoint.corrupt", f"{path}: damaged: it does not list {', '.join(unlisted)}"
        )
    return entries


def verify_manifest(directory: Path, share: int = 0, shares: int = 1) -> int:
    """Re-hashes a checkpoint's files; ranks split the work as (share, shares).

    Returns:
        The number of files that the manifest lists.

    Raises:
        CheckpointError: naming the first file that is missing, of another size, or changed.
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
                f"{path}: damaged: {path.stat().st_size:,} bytes, the manifest says "
                f"{entry['bytes']:,}",
            )
    for name in sorted(entries)[share::shares]:
        if fingerprint(directory, [name])[name] != entries[name]:
            raise CheckpointError(
                "checkpoint.corrupt", f"{directory / name}: damaged: its sha256 has changed"
            )
    return len(entries)


def write_json(path: Path, value: Any) -> None:
    """JSON that is on the disk, whole, when this returns."""
    write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())
