"""Output folders that exist whole or not at all."""

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

MARKER = "export.json"  # tells a folder of ours, which may be replaced, from anybody else's


def check_output_dir(out: Path) -> None:
    """Refuses a place that an export cannot take.

    Raises:
        ConfigError: `out` is a file, or a folder with something else in it.
        DataError: nothing can be written there.
    """
    if out.exists():
        if not out.is_dir():
            raise ConfigError(
                "export.not_folder", f"{out} is a file: name a new folder to export to"
            )
        if any(out.iterdir()) and not (out / MARKER).is_file():
            raise ConfigError(
                "export.not_empty",
                f"{out} holds something that is no earlier export (it has no {MARKER}): "
                "name a new folder, or empty this one",
            )
    check_writable_dir(out.absolute().parent)


@contextmanager
def replaced_atomically(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place when the block ends without error.

    Raises:
        ConfigError, DataError: as `check_output_dir`.
    """
    check_output_dir(out)
    draft = out.with_name(f".{out.name}.writing-{os.getpid()}")
    former = out.with_name(f".{out.name}.former-{os.getpid()}")
    for left in out.parent.glob(f".{escape(out.name)}.writing-*"):
        if not psutil.pid_exists(int(left.name.rpartition("-")[2])):  # of an export that was killed
            shutil.rmtree(left, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        if out.exists():
            out.rename(former)
        draft.rename(out)
    except OSError as error:
        raise ConfigError(
            "output.not_writable", f"{out}: cannot be written: {error.strerror or error}"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def write_marker(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes what the export is made of as JSON."""
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
