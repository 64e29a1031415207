"""Output directories that are written completely or not at all."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leviathan.errors import ConfigError
from leviathan.files import atomic_directory, check_writable_dir

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
    try:
        with atomic_directory(out) as draft:
            yield draft
    except OSError as error:
        raise ConfigError(
            "output.not_writable", f"{out}: not writable: {error.strerror or error}"
        ) from error


def write_marker(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes properties of the export as JSON."""
    (folder / MARKER).write_text(json.dumps(facts, indent=2) + "\n")
