"""Output directories that are written completely or not at all."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import psutil

from leviathan.errors import ConfigError
from leviathan.files import check_writable_dir

MARKER = "export.json"  # marks a directory written by this project, which may be replaced


def check_output_dir(out: Path) -> None:
    """Checks that an export can be written to `out`.

    Raises:
        ConfigError: `out` is a file, or a directory that contains other files.
        DataError: the parent directory is not writable.
    """
    if out.exists():
        if not out.is_dir():
            raise ConfigError(
                "export.not_folder",
                f"{out}: is a file, expected a directory; choose another output path",
            )
        if any(out.iterdir()) and not (out / MARKER).is_file():
            raise ConfigError(
                "export.not_empty",
                f"{out}: not empty and not an earlier export (it has no {MARKER}); choose another "
                "output path, or delete its contents",
            )
    check_writable_dir(out.absolute().parent)


@contextmanager
def replaced_atomically(out: Path) -> Iterator[Path]:
    """Yields a temporary directory that replaces `out` when the block ends without an error.

    Raises:
        ConfigError, DataError: as `check_output_dir`.
    """
    check_output_dir(out)
    draft = out.with_name(f".{out.name}.writing-{os.getpid()}")
    former = out.with_name(f".{out.name}.former-{os.getpid()}")
    for left in out.parent.glob(f".{escape(out.name)}.writing-*"):
        if not psutil.pid_exists(
            int(left.name.rpartition("-")[2])
        ):  # left by an export that was killed
            shutil.rmtree(left, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        if out.exists():
            out.rename(former)
        draft.rename(out)
    except OSError as error:
        raise ConfigError(
            "output.not_writable", f"{out}: not writable: {error.strerror or error}"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def write_marker(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes properties of the export as JSON."""
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
