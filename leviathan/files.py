"""Files that are there whole or not at all."""

import os
from pathlib import Path
from tempfile import TemporaryFile

from leviathan.errors import DataError


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
