"""Directories of plain text: one document per file, one task per directory."""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from leviathan.data.prepare.records import Document, InvalidRecord, RecordSchema, RejectedRecord
from leviathan.data.prepare.source import TEXT_SUFFIXES, ByteSource, Source
from leviathan.data.prepare.unpack import BOM, BUFFER, named, not_text, packing, unpack

_HEAD = 512


@dataclass(frozen=True)
class TextFolder(Source):
    """The text files of one directory, by name; each is one document.

    They are one task: one task per small file would cost more than its work.
    """

    folder: str
    files: tuple[ByteSource, ...]

    @property
    @override
    def name(self) -> str:
        return self.folder

    @override
    def size(self) -> int | None:
        sizes = [file.size() for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @override
    def stamp(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.stamp()}\0".encode())
        return f"{len(self.files)} files, {digest.hexdigest()[:32]}"

    @override
    def place(self, line: int) -> tuple[str, None]:
        return self.files[line - 1].name, None


def group_texts(sources: Iterable[Source]) -> list[Source]:
    """Groups text files into one source per directory, at the position of the first; others stay.

    A single text file in its directory's list keeps its own name.
    """
    grouped: dict[str, list[ByteSource]] = {}
    kept: list[Source | list[ByteSource]] = []
    for source in sources:
        if not isinstance(source, ByteSource) or source.suffix not in TEXT_SUFFIXES:
            kept.append(source)
            continue
        folder = source.name.removesuffix(source.base)
        if folder not in grouped:
            kept.append(grouped.setdefault(folder, []))
        grouped[folder].append(source)
    return [
        TextFolder(_name(each), tuple(each)) if isinstance(each, list) else each for each in kept
    ]


def _name(files: list[ByteSource]) -> str:
    return files[0].name if len(files) == 1 else files[0].name.rpartition("/")[0] or "."


def read_texts(
    source: TextFolder, reading: RecordSchema, on_bytes: Callable[[int], Any] | None, digest: Any
) -> Iterator[Document | RejectedRecord]:
    """Yields the documents of a directory; `line` is the number of the file."""
    for number, file in enumerate(source.files, 1):
        if digest is not None:
            digest.update(f"\0{file.base}\0".encode())
        try:
            yield Document(
                _read(file, reading, on_bytes, digest), reading.default_subset, number, 0
            )
        except InvalidRecord as error:
            yield RejectedRecord(number, 0, str(error))


def _read(
    file: ByteSource, reading: RecordSchema, on_bytes: Callable[[int], Any] | None, digest: Any
) -> str:
    with named(file), file.open() as raw:
        content = _bounded(unpack(file, "jsonl", raw, on_bytes, digest), reading)
        kind = packing(content[:_HEAD])
        if kind == "parquet":
            raise InvalidRecord("a parquet file, not a text. Rename it to .parquet")
        if kind in ("zst", "gz"):
            content = _bounded(unpack(file, kind, io.BytesIO(content)), reading)
    if problem := not_text(content[:_HEAD]):
        raise InvalidRecord(problem)
    try:
        return content.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise InvalidRecord(f"invalid UTF-8: byte 0x{byte:02x} at position {error.start}") from None


def _bounded(text: io.BufferedReader, reading: RecordSchema) -> bytes:
    content = bytearray()
    while piece := text.read(BUFFER):
        content += piece
        if len(content) > reading.max_document_bytes:
            raise InvalidRecord(reading.too_long)
    return bytes(content)
