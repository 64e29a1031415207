"""Which files a corpus consists of: files, globs and folders, always in name order."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from leviathan.console import say
from leviathan.errors import DataError

SUFFIXES = {".jsonl", ".ndjson", ".zst", ".zstd", ".gz", ".parquet"}


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files behind `patterns`, pattern by pattern, each pattern's files in name order.

    Folders are searched through; hidden files and files of other kinds found by a folder or a
    glob are left out and named, a file given by its own name is always taken. A file that several
    patterns find is taken once.

    Raises:
        DataError: a pattern finds nothing readable.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            matches = [path]
        elif path.is_dir():
            matches = _keep_corpus_files(_files_below(path), pattern)
        elif glob.has_magic(pattern):
            hits = map(Path, glob.glob(str(path), recursive=True))
            matches = _keep_corpus_files((hit for hit in hits if hit.is_file()), pattern)
        elif path.exists():
            raise DataError(f"{pattern} is not a regular file: give files, folders or globs")
        else:
            raise DataError(f"no such file or folder: {pattern} (in {Path.cwd()})")
        for match in matches:
            if match in found:
                say(f"warning: {match} is listed twice and read once", style="yellow")
            found[match] = None
    return list(found)


def _files_below(folder: Path) -> Iterable[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names)


def _keep_corpus_files(paths: Iterable[Path], pattern: str) -> list[Path]:
    """Splits off and names what is no corpus file, and sorts the rest by name."""
    kept: list[Path] = []
    litter: list[Path] = []
    for path in sorted(paths, key=lambda path: path.as_posix()):
        is_corpus = path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
        (kept if is_corpus else litter).append(path)
    if litter:
        names = ", ".join(path.name for path in litter[:8])
        more = f" and {len(litter) - 8} more" if len(litter) > 8 else ""
        say(f"{pattern}: ignored {names}{more} (expected {', '.join(sorted(SUFFIXES))})")
    if not kept:
        raise DataError(
            f"{pattern}: no corpus files found there (expected {', '.join(sorted(SUFFIXES))})"
        )
    return kept
