"""Sources: one file or shard of a corpus, which is tokenized as one task.

A source is small, frozen and picklable: it is sent to worker processes and other nodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from typing_extensions import override

from leviathan.console import say
from leviathan.data.prepare.local_files import printable
from leviathan.errors import DataError

Split = Literal[
    "train", "val", "hash"
]  # hash: the digest of the text decides, document by document

SUFFIXES = {".jsonl", ".ndjson", ".zst", ".zstd", ".gz", ".parquet"}
TEXT_SUFFIXES = (".txt", ".md")


class Source(ABC):
    """One file or shard of a corpus, read from beginning to end."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in messages and in `dataset.json`; unique within a corpus."""

    @abstractmethod
    def size(self) -> int | None:
        """Bytes as stored (compressed, if it is), or None if unknown."""

    @abstractmethod
    def stamp(self) -> str:
        """A change of this value means that the content may have changed; not a hash of the
        bytes."""

    def place(self, line: int) -> tuple[str, int | None]:
        """The file and line of record `line`; line None: the complete file."""
        return self.name, line


class ByteSource(Source):
    """A source that is one stream of bytes."""

    @abstractmethod
    def open(self) -> IO[bytes]:
        """Opens the bytes for reading; unbuffered if possible."""

    @property
    def base(self) -> str:
        """Its name without directories."""
        return self.name.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last suffix of its name, lower case, with the dot."""
        return PurePosixPath(self.base).suffix.lower()


@dataclass(frozen=True)
class FileSource(ByteSource):
    """A local file."""

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


def keep_corpus_files(sources: Iterable[ByteSource], pattern: str) -> list[ByteSource]:
    """Omits other files with a message, and sorts the rest by name.

    Text files are read only if there are no other corpus files: next to shards, they document them.

    Raises:
        DataError: no file remains.
    """
    ordered = sorted(sources, key=lambda source: source.name)
    seen = [source for source in ordered if not source.base.startswith(".")]
    kept = [source for source in seen if source.suffix in SUFFIXES]
    kept = kept or [source for source in seen if source.suffix in TEXT_SUFFIXES]
    expected = f"(expected {', '.join(sorted(SUFFIXES))}, or {' and '.join(TEXT_SUFFIXES)} alone)"
    if not kept:
        raise DataError("source.not_found", f"{pattern}: no corpus files found {expected}")
    of_corpus = {source.name for source in kept}
    litter = [printable(source.base) for source in ordered if source.name not in of_corpus]
    if litter:
        more = f" and {len(litter) - 8} more" if len(litter) > 8 else ""
        say(f"{pattern}: ignored {', '.join(litter[:8])}{more} {expected}")
    return kept
