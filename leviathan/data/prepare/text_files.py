"""Folders of plain text: one document a file, one task a folder."""

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
    """The text files of one folder, by name; each is one document.

    Hundreds of thousands of small files are one task: a task each would cost more than its work.
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
    """Text files become one source a folder, where the first of them stood; others stay.

    One text file alone in its folder's list goes by its own name.
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
    """The documents of a folder; `line` counts the files: `TextFolder.place` names them."""
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
            raise InvalidRecord("a parquet file, not a text: give it a .parquet name")
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
