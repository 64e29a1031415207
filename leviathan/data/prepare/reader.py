"""Reads documents out of sources, line by line, and says exactly what is wrong with a line.

What a file is, its first bytes decide, not its name. A damaged file (cut off, bad checksum, not
text at all) is a `DataError`; a damaged *line* is handed on as a `BadLine`, for the caller to
refuse or set aside. Memory is bounded by `Reading.max_document_bytes`, whatever a file holds.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

from leviathan.config.schema import PrepConfig
from leviathan.data.prepare.hub import HubSource, read_hub
from leviathan.data.prepare.parquet import read_parquet
from leviathan.data.prepare.records import (
    NO_SUBSET,
    BadLine,
    Document,
    Reading,
    Unusable,
    parse,
)
from leviathan.data.prepare.source import ByteSource, Source
from leviathan.data.prepare.texts import TextFolder, read_texts
from leviathan.data.prepare.unpack import BOM, BUFFER, named, sniff, unpack

__all__ = ["NO_SUBSET", "BadLine", "Document", "Reading", "read", "reading_of"]

OnBytes = Callable[[int], Any] | None


def reading_of(source: Source, config: PrepConfig) -> Reading:
    """Where text and subset stand in `source`, and how long a document may be."""
    keys = {"text_key": config.source.text_key, "subset_key": config.source.subset_key}
    if isinstance(source, HubSource):
        keys |= source.reading
    return Reading(
        default_subset=config.source.default_subset,
        max_document_bytes=config.max_document_bytes,
        **keys,
    )


def read(
    source: Source, on_bytes: OnBytes = None, digest: Any = None, reading: Reading | None = None
) -> Iterator[Document | BadLine]:
    """Yields the documents and bad lines of one source, in order; blank lines are skipped.

    Args:
        source: jsonl, plain or packed as zst (every frame) or gz; parquet; a folder of texts; a
            shard of a Hub dataset.
        on_bytes: told the number of stored bytes read, as they are read.
        digest: fed with every byte of the source.
        reading: where text and subset stand; as in The Pile if not given.

    Raises:
        DataError: unreadable, truncated, damaged, or not a corpus file at all.
    """
    reading = reading or Reading()
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


def _read_lines(text: io.BufferedReader, reading: Reading) -> Iterator[Document | BadLine]:
    limit = reading.max_document_bytes
    offset = number = 0
    while line := text.readline(limit + 3):  # room for the line's end
        number += 1
        start, offset = offset, offset + len(line)
        if len(line.rstrip(b"\r\n") if len(line) > limit else line) > limit:
            offset += _skip_line(text) if not line.endswith(b"\n") else 0
            yield BadLine(number, start, reading.too_long)
            continue
        if number == 1:
            line = line.removeprefix(BOM)
        if line and not line.isspace():
            try:
                yield parse(line, reading, number, start)
            except Unusable as error:
                yield BadLine(number, start, str(error))


def _skip_line(text: io.BufferedReader) -> int:
    """Reads past the rest of a line; the number of its bytes."""
    skipped = 0
    while piece := text.readline(BUFFER):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
