"""Reading JSON files, and writing files completely or not at all."""

import json
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from leviathan.errors import DataError, LeviathanError


def check_writable_dir(folder: Path) -> None:
    """Refuses a folder that could not be made or written to; before the work, not after it.

    Nothing is made: a nameless file is tried in the nearest folder that is there.

    Raises:
        DataError: something in its path is a file, or nothing can be written there.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise DataError("output.not_writable", f"cannot write to {folder}: {there} is not a folder")
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise DataError(
            "output.not_writable", f"cannot write to {folder}: {error.strerror}"
        ) from None


def check_writable_file(file: Path) -> None:
    """As `check_writable_dir`, for a file that is to be written.

    Raises:
        DataError: it is a folder, or its own folder cannot be written to.
    """
    if file.is_dir():
        raise DataError("output.not_writable", f"cannot write {file}: it is a folder; name a file")
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
    """Writes `content` beside `path`, flushes it to the disk and renames it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
