"""Reads JSON files, and writes files atomically."""

import json
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from leviathan.errors import DataError, LeviathanError


def check_writable_dir(folder: Path) -> None:
    """Checks before long work that a directory can be created and written to.

    Creates nothing visible: an unnamed temporary file is opened in the nearest existing parent.

    Raises:
        DataError: a part of the path is a file, or the directory is not writable.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise DataError(
            "output.not_writable", f"cannot write to {folder}: {there} is not a directory"
        )
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise DataError(
            "output.not_writable", f"cannot write to {folder}: {error.strerror}"
        ) from None


def check_writable_file(file: Path) -> None:
    """Like `check_writable_dir`, for an output file.

    Raises:
        DataError: it is a directory, or its parent is not writable.
    """
    if file.is_dir():
        raise DataError(
            "output.not_writable", f"cannot write {file}: it is a directory; expected a file name"
        )
    check_writable_dir(file.parent)


def read_json(
    path: Path, code: str, remedy: str = "", error: type[LeviathanError] = DataError
) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: path of the file.
        code: error code of a file that is missing, unreadable or corrupt.
        remedy: sentence on what to do, the end of the message.
        error: error to raise.

    Raises:
        LeviathanError: the file is missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        reason = f"cannot be read ({problem.strerror})"
    except (ValueError, RecursionError) as problem:
        reason = f"corrupt ({problem})"
    else:
        if isinstance(value, dict):
            return value
        reason = f"corrupt: expected a JSON object, found {type(value).__name__}"
    raise error(code, f"{path}: {reason}{'. ' if remedy else ''}{remedy}")


def write_atomic(path: Path, content: bytes) -> None:
    """Writes `content` to a temporary file, flushes it to disk and renames it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
