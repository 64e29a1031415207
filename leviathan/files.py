"""Reads JSON files, and writes files and directories atomically."""

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import psutil

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


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file; on success, flushes it to disk and renames it to `path`."""
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Creates a temporary directory; on success, it replaces `path`; else `path` is unchanged."""
    temporary = _temporary(path)
    former = temporary.with_name(f"{temporary.name}.former")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if path.exists():
            path.rename(former)
        try:
            temporary.rename(path)
        except OSError:
            if former.exists():
                former.rename(path)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Removes temporary directories that killed processes of this host left for `path`."""
    for leftover in path.parent.glob(f".{escape(path.name)}.{escape(_host())}-*.tmp"):
        if not psutil.pid_exists(int(leftover.stem.rsplit("-", 2)[1])):
            shutil.rmtree(leftover, ignore_errors=True)


def _host() -> str:
    return socket.gethostname()[:64]


def _temporary(path: Path) -> Path:
    """A hidden path next to `path`, unique to this thread also on a shared filesystem."""
    writer = f"{_host()}-{os.getpid()}-{threading.get_ident()}"
    return path.with_name(f".{path.name}.{writer}.tmp")


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file atomically; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(content)
