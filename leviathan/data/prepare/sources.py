"""Which sources a corpus consists of: files, folders, globs, URLs and the Hub."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from leviathan.config.schema import PrepConfig, SourceConfig, ValidationConfig
from leviathan.console import say
from leviathan.data.prepare.source import (
    ByteSource,
    FileSource,
    Source,
    Split,
    keep_corpus_files,
)
from leviathan.errors import DataError


def find_splits(config: PrepConfig) -> list[tuple[Source, Split]]:
    """The sources of a preparation in order, each with the split it goes to.

    Raises:
        DataError: nothing is there, or nothing is left to train on.
    """
    held_out = _find(config.validation)
    of_validation = {_identity(source) for source in held_out}
    kind: Split = "hash" if config.validation.fraction and not held_out else "train"
    training: list[tuple[Source, Split]] = []
    for source in _find(config.source):
        if _identity(source) in of_validation:
            say(f"{source.name} is held out for validation and not trained on")
        else:
            training.append((source, kind))
    if not training:
        raise DataError("every file of source.paths is held out: nothing is left to train on")
    return training + [(source, "val") for source in held_out]


def _find(config: SourceConfig | ValidationConfig) -> list[Source]:
    if config.hub is None:
        return find_inputs(config.paths)
    from leviathan.data.prepare.hub import find_hub

    return find_hub(config.hub)


def _identity(source: Source) -> str:
    return str(source.path.resolve()) if isinstance(source, FileSource) else source.name


def find_inputs(patterns: Sequence[str]) -> list[Source]:
    """The sources behind `patterns`, pattern by pattern, each pattern's in name order.

    Folders are searched through; hidden files and files of other kinds found by a folder or a
    glob are left out and named, a file given by its own name is always taken. A file that several
    patterns find is taken once. Text files become one source a folder.

    Raises:
        DataError: a pattern finds nothing readable.
    """
    from leviathan.data.prepare.texts import group_texts
    from leviathan.data.prepare.urls import find_urls, is_url

    found: dict[str, ByteSource] = {}
    for pattern in patterns:
        for source in find_urls(pattern) if is_url(pattern) else _find_local(pattern):
            if source.name in found:
                say(f"warning: {source.name} is listed twice and read once", style="yellow")
            found.setdefault(source.name, source)
    return group_texts(found.values())


def _find_local(pattern: str) -> list[ByteSource]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [FileSource(path)]
    if path.is_dir():
        return keep_corpus_files(map(FileSource, _files_below(path)), pattern)
    if glob.has_magic(pattern):
        hits = map(Path, glob.glob(str(path), recursive=True))
        return keep_corpus_files((FileSource(hit) for hit in hits if hit.is_file()), pattern)
    if path.exists():
        raise DataError(f"{pattern} is not a regular file: give files, folders or globs")
    raise DataError(f"no such file or folder: {pattern} (in {Path.cwd()})")


def _files_below(folder: Path) -> Iterable[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names)
