"""What a corpus consists of: sources, each of which becomes one task and one part.

A source is small, frozen and picklable: it travels to worker processes and other machines.
"""

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from typing_extensions import override

from leviathan.config.schema import PrepConfig
from leviathan.console import say
from leviathan.errors import DataError

Split = Literal["train", "val", "hash"]  # hash: the text's digest decides, document by document

SUFFIXES = {".jsonl", ".ndjson", ".zst", ".zstd", ".gz", ".parquet"}


class Source(ABC):
    """One shard of a corpus, to be read from its beginning to its end."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What people see, and what `dataset.json` records; no two sources of a corpus share it."""

    @abstractmethod
    def size(self) -> int | None:
        """Bytes as stored (packed, if it is), or None where nobody can say."""

    @abstractmethod
    def stamp(self) -> str:
        """Another one means that the content may have changed; cheap, not a hash of the bytes."""


class ByteSource(Source):
    """A source that is one stream of bytes."""

    @abstractmethod
    def open(self) -> IO[bytes]:
        """Opens the bytes for reading; unbuffered where there is a choice."""

    @property
    def suffix(self) -> str:
        """The last suffix of its name, lower case, with the dot."""
        return os.path.splitext(self.name)[1].lower()  # noqa: PTH122 - also for URLs


@dataclass(frozen=True)
class FileSource(ByteSource):
    """A file on this machine."""

    path: Path

    @property
    @override
    def name(self) -> str:
        return str(self.path)

    @override
    def size(self) -> int:
        return self.path.stat().st_size

    @override
    def stamp(self) -> str:
        status = self.path.stat()
        return f"{status.st_size} bytes, modified {status.st_mtime_ns}"

    @override
    def open(self) -> IO[bytes]:
        return self.path.open("rb", buffering=0)


def find_splits(config: PrepConfig) -> list[tuple[Source, Split]]:
    """The sources of a preparation in order, each with the split it goes to.

    Raises:
        DataError: nothing is there, or nothing is left to train on.
    """
    held_out = find_inputs(config.validation.paths)
    of_validation = {_identity(source) for source in held_out}
    kind: Split = "hash" if config.validation.fraction and not held_out else "train"
    training: list[tuple[Source, Split]] = []
    for source in find_inputs(config.source.paths):
        if _identity(source) in of_validation:
            say(f"{source.name} is held out for validation and not trained on")
        else:
            training.append((source, kind))
    if not training:
        raise DataError("every file of source.paths is held out: nothing is left to train on")
    return training + [(source, "val") for source in held_out]


def _identity(source: Source) -> str:
    return str(source.path.resolve()) if isinstance(source, FileSource) else source.name


def find_inputs(patterns: Sequence[str]) -> list[Source]:
    """The sources behind `patterns`, pattern by pattern, each pattern's in name order.

    Folders are searched through; hidden files and files of other kinds found by a folder or a
    glob are left out and named, a file given by its own name is always taken. A file that several
    patterns find is taken once.

    Raises:
        DataError: a pattern finds nothing readable.
    """
    found: dict[str, Source] = {}
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
        for source in map(FileSource, matches):
            if source.name in found:
                say(f"warning: {source.name} is listed twice and read once", style="yellow")
            found[source.name] = source
    return list(found.values())


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
