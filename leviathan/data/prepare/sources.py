"""What a corpus consists of: sources, each of which becomes one task and one part.

A source is small, frozen and picklable: it travels to worker processes and other machines.
"""

import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from typing_extensions import override

from leviathan.config.schema import PrepConfig, SourceConfig, ValidationConfig
from leviathan.console import say
from leviathan.errors import DataError

Split = Literal["train", "val", "hash"]  # hash: the text's digest decides, document by document

SUFFIXES = {".jsonl", ".ndjson", ".zst", ".zstd", ".gz", ".parquet"}
TEXT_SUFFIXES = (".txt", ".md")


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

    def place(self, line: int) -> tuple[str, int | None]:
        """The file that `line` stands in and its line there, None where it is the whole file."""
        return self.name, line


class ByteSource(Source):
    """A source that is one stream of bytes."""

    @abstractmethod
    def open(self) -> IO[bytes]:
        """Opens the bytes for reading; unbuffered where there is a choice."""

    @property
    def base(self) -> str:
        """Its name without folders."""
        return self.name.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last suffix of its name, lower case, with the dot."""
        return PurePosixPath(self.base).suffix.lower()


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


def keep_corpus_files(sources: Iterable[ByteSource], pattern: str) -> list[ByteSource]:
    """Splits off and names what is no corpus file, and sorts the rest by name.

    Text files count where there is nothing else: beside shards they are their README.

    Raises:
        DataError: nothing is kept.
    """
    ordered = sorted(sources, key=lambda source: source.name)
    seen = [source for source in ordered if not source.base.startswith(".")]
    kept = [source for source in seen if source.suffix in SUFFIXES]
    kept = kept or [source for source in seen if source.suffix in TEXT_SUFFIXES]
    expected = f"(expected {', '.join(sorted(SUFFIXES))}, or {' and '.join(TEXT_SUFFIXES)} alone)"
    if not kept:
        raise DataError(f"{pattern}: no corpus files found there {expected}")
    of_corpus = {source.name for source in kept}
    litter = [source.base for source in ordered if source.name not in of_corpus]
    if litter:
        more = f" and {len(litter) - 8} more" if len(litter) > 8 else ""
        say(f"{pattern}: ignored {', '.join(litter[:8])}{more} {expected}")
    return kept
