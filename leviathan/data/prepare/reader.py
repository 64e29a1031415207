"""Reads documents from sources, line by line, and reports the problem of an invalid line.

The first bytes of a file determine its format, not its name. A corrupt file (truncated, bad
checksum, not text) raises `DataError`; an invalid line is yielded as a `RejectedRecord`. Memory is
bounded by `RecordSchema.max_document_bytes`.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

from leviathan.config.schema import PrepConfig
from leviathan.data.prepare.hub import HubSource, read_hub
from leviathan.data.prepare.parquet import read_parquet
from leviathan.data.prepare.records import (
    NO_SUBSET,
    Document,
    InvalidRecord,
    RecordSchema,
    RejectedRecord,
    parse,
)
from leviathan.data.prepare.source import ByteSource, Source
from leviathan.data.prepare.text_files import TextFolder, read_texts
from leviathan.data.prepare.unpack import BOM, BUFFER, named, sniff, unpack

__all__ = ["NO_SUBSET", "Document", "RecordSchema", "RejectedRecord", "read", "record_schema"]

OnBytes = Callable[[int], Any] | None


def record_schema(source: Source, config: PrepConfig) -> RecordSchema:
    """Where text and subset are in `source`, and how long a document may be."""
    keys = {"text_key": config.source.text_key, "subset_key": config.source.subset_key}
    if isinstance(source, HubSource):
        keys |= source.reading
    return RecordSchema(
        default_subset=config.source.default_subset,
        max_document_bytes=config.max_document_bytes,
        **keys,
    )


def read(
    source: Source,
    on_bytes: OnBytes = None,
    digest: Any = None,
    reading: RecordSchema | None = None,
) -> Iterator[Document | RejectedRecord]:
    """Yields the documents and rejected records of one source, in order; skips blank lines.

    Args:
        source: jsonl, plain or packed as zst (every frame) or gz; parquet; a directory of texts; a
            shard of a Hub dataset.
        on_bytes: called with the number of stored bytes as they are read.
        digest: updated with every byte of the source.
        reading: location of text and subset; as in The Pile by default.

    Raises:
        DataError: the source is unreadable, truncated, corrupt, or not a corpus file.
    """
    reading = reading or RecordSchema()
    if isinstance(source, HubSource):
        yield from read_hub(source, reading, on_bytes, digest)
    elif isinstance(source, TextFolder):
        yield from read_texts(source, reading, on_bytes, digest)
    else:
        assert isinstance(source, ByteSource)
        kind = sniff(source)
        with named(source):
            if kind == "parquet":
                yield from read_parquet(source, reading, on_bytes, digest)
            elif kind != "empty":
                with source.open() as raw:
                    yield from _read_lines(unpack(source, kind, raw, on_bytes, digest), reading)


# ---------------------------------------------------------------- lines


def _read_lines(
    text: io.BufferedReader, reading: RecordSchema
) -> Iterator[Document | RejectedRecord]:
    limit = reading.max_document_bytes
    offset = number = 0
    while line := text.readline(limit + 3):  # plus the line break
        number += 1
        start, offset = offset, offset + len(line)
        if len(line.rstrip(b"\r\n") if len(line) > limit else line) > limit:
            offset += _skip_line(text) if not line.endswith(b"\n") else 0
            yield RejectedRecord(number, start, reading.too_long)
            continue
        if number == 1:
            line = line.removeprefix(BOM)
        if line and not line.isspace():
            try:
                yield parse(line, reading, number, start)
            except InvalidRecord as error:
                yield RejectedRecord(number, start, str(error))


def _skip_line(text: io.BufferedReader) -> int:
    """Skips the rest of a line; returns the number of its bytes."""
    skipped = 0
    while piece := text.readline(BUFFER):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
