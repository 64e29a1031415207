"""What a source is: one shard of a corpus, which becomes one task and one part.

A source is small, frozen and picklable: it travels to worker processes and other machines.
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
        """Bytes as stored (packed, if it is), or None where no one can say."""

    @abstractmethod
    def stamp(self) -> str:
        """Another one means that the content may have changed; cheap, not a hash of the bytes."""

    def place(self, line: int) -> tuple[str, int | None]:
        """The file that `line` is in and its line there, None where it is the whole file."""
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
        raise DataError("source.not_found", f"{pattern}: no corpus files found there {expected}")
    of_corpus = {source.name for source in kept}
    litter = [printable(source.base) for source in ordered if source.name not in of_corpus]
    if litter:
        more = f" and {len(litter) - 8} more" if len(litter) > 8 else ""
        say(f"{pattern}: ignored {', '.join(litter[:8])}{more} {expected}")
    return kept
