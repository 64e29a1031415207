"""Converts one line or row of a corpus to a document, or reports the problem with it."""

import json
from dataclasses import dataclass, field
from typing import Any

import orjson

from leviathan.data.prepare.sources import Source

NO_SUBSET = "unnamed"  # documents without a subset name
MAX_DOCUMENT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the subset it belongs to; `text` may be empty.

    Attributes:
        line: 1-based number of the line, row or text file.
        byte_offset: position of the line in the uncompressed text; None for rows.
        no_subset: why `subset` is the default subset; None if the record has a subset name, or if
            the source has no records (plain text).
    """

    text: str
    subset: str
    line: int
    byte_offset: int | None
    no_subset: str | None = None


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A line or row that is not a valid document; `line` and `byte_offset` as in `Document`."""

    line: int
    byte_offset: int | None
    reason: str

    def message(self, source: Source) -> str:
        """The message `file:line: reason`."""
        place = place_text(source, self.line, self.byte_offset)
        if source.place(self.line)[1] is None or self.byte_offset is None:
            return f"{place}: {self.reason}"
        return f"{place}: {self.reason} (byte {self.byte_offset:,} of the text)"


def place_text(source: Source, number: int, byte_offset: int | None) -> str:
    """The position of a record for messages: `file:line`, `file: row number`, or the text file."""
    file, line = source.place(number)
    if line is None:
        return file
    return f"{file}: row {line:,}" if byte_offset is None else f"{file}:{line}"


def rejected_records(count: int) -> str:
    """The number of rejected records, in words."""
    return f"{count:,} rejected record{'s' if count != 1 else ''}"


@dataclass(frozen=True)
class RecordSchema:
    """Schema of the records of a corpus.

    Attributes:
        text_key: location of the text: a dotted path through objects, maps and strings that contain
            JSON objects, or the exact name of a key or column that contains dots.
        subset_key: location of the subset's name, in the same form.
        default_subset: the subset of documents without a subset name.
        max_document_bytes: longer lines, rows and text files are rejected.
    """

    text_key: str = "text"
    subset_key: str = "meta.pile_set_name"
    default_subset: str = NO_SUBSET
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    text_path: tuple[str, ...] = field(init=False)
    subset_path: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text_path", tuple(self.text_key.split(".")))
        object.__setattr__(self, "subset_path", tuple(self.subset_key.split(".")))

    @property
    def too_long(self) -> str:
        """The reason for rejecting a longer document."""
        return f"longer than {self.max_document_bytes:,} bytes; raise max_document_bytes"


class InvalidRecord(Exception):
    """The reason for rejecting a line or row."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Placeholder for a value that could not be decoded."""

    reason: str


MISSING = "missing"  # value of `Document.no_subset`: the record has no value at `subset_key`
_NOTHING = object()


def parse(line: bytes, reading: RecordSchema, number: int, offset: int) -> Document:
    """The document in one line of JSON.

    Raises:
        InvalidRecord: the line is not a valid document.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        # Slower, but accepts NaN and gives better reasons; what it accepts is accepted.
        return document(_parse_slowly(line), reading, number, offset)
    return document(
        record, reading, number, offset, unicode=True
    )  # otherwise it would have rejected the line


def _parse_slowly(line: bytes) -> Any:
    try:
        return json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        raise InvalidRecord(
            f"invalid UTF-8: byte 0x{line[error.start]:02x} at position {error.start} of the line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"not JSON ({error})") from None


def document(
    record: Any, reading: RecordSchema, number: int, offset: int | None, unicode: bool = False
) -> Document:
    """Converts a decoded line or row to a document; `unicode`: its texts are known to be valid.

    Raises:
        InvalidRecord: the record is not a valid document.
    """
    text = record
    for key in reading.text_path:
        if not isinstance(text, dict) or key not in text:
            text, unicode = _look_up(record, reading.text_path, reading.text_key), False
            break
        text = text[key]
    if not isinstance(text, str):
        raise InvalidRecord(_why_no_text(record, text, reading))
    if not unicode and not text.isascii():
        _check_unicode(text, reading.text_key)
    subset = record
    for key in reading.subset_path:
        subset = subset.get(key) if isinstance(subset, dict) else None
    if isinstance(subset, str) and subset and subset.isprintable():
        return Document(text, subset, number, offset)
    subset = _look_up(record, reading.subset_path, reading.subset_key)
    if isinstance(subset, str) and subset and subset.isprintable():
        return Document(text, subset, number, offset)
    return Document(text, reading.default_subset, number, offset, _why_no_subset(subset))


def _look_up(record: Any, path: tuple[str, ...], key: str) -> Any:
    """The value at `path`, else the value of the exact `key`; `_NOTHING` if neither exists.

    The path may lead through objects, maps (pairs in parquet), and strings that contain a JSON
    object. A null counts as missing.
    """
    value = record
    for name in path:
        if isinstance(value, Unreadable):
            break
        value = _entries(value).get(name)
    if isinstance(record, dict) and (value is None or isinstance(value, Unreadable)):
        value = record.get(key, value)
    return _NOTHING if value is None else value


def _entries(value: Any) -> dict[Any, Any]:
    """The entries of `value` in which the next name of a path is looked up."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):
        return dict(value)
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            return orjson.loads(value)
        except ValueError:
            try:
                return json.loads(value)  # as in `parse`
            except (ValueError, RecursionError):
                return {}
    return {}


def _why_no_text(record: Any, found: Any, reading: RecordSchema) -> str:
    """Why a record has no text: the first name of the path that is missing, or the wrong type."""
    if isinstance(found, Unreadable):
        return f"{reading.text_key!r} has {found.reason}"
    value = record
    for key in reading.text_path:
        entries = _entries(value)
        if key in entries:
            value = entries[key]
            continue
        if found is not _NOTHING:
            break  # it was found by its exact name
        if value is record and not isinstance(record, dict):
            expected = f"expected an object with the key {reading.text_key!r}"
            return f"{expected}, found {_kind_of(record)}"
        if not entries and not isinstance(value, dict):
            return f"no key {reading.text_key!r} (cannot look up {key!r} in {_kind_of(value)})"
        keys = ", ".join(repr(key) for key in list(entries)[:8]) or "none"
        return f"no key {reading.text_key!r} (keys found: {keys})"
    return f"{reading.text_key!r} must be a string, found {_kind_of(found)}"


def _why_no_subset(found: Any) -> str:
    """Why a record has no subset name: `MISSING`, or a description of the value found instead."""
    if found is _NOTHING:
        return MISSING
    if isinstance(found, Unreadable):
        return found.reason
    if isinstance(found, str):
        return "a text with control characters" if found else "an empty text"
    return _kind_of(found)


def _check_unicode(text: str, key: str) -> None:
    """Rejects lone surrogates, which tiktoken would silently replace.

    Raises:
        InvalidRecord: the text contains a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(
            f"{key!r} contains the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is not a valid Unicode"
        ) from None


def _kind_of(value: Any) -> str:
    names = {
        type(None): "null",
        type(_NOTHING): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a text",
        bytes: "bytes",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "a value")
