"""One line or row of a corpus → a document, or exactly what is wrong with it."""

import json
from dataclasses import dataclass, field
from typing import Any

import orjson

from leviathan.data.prepare.source import Source

NO_SUBSET = "unnamed"  # documents that do not say which subset they are of
MAX_DOCUMENT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the subset it belongs to; `text` may be empty."""

    text: str
    subset: str
    line: int
    byte_offset: int


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no document: 1-based number, byte offset in the uncompressed text, reason."""

    line: int
    byte_offset: int
    reason: str

    def message(self, source: Source) -> str:
        """One sentence for people: `file:line: reason`."""
        file, line = source.place(self.line)
        if line is None:
            return f"{file}: {self.reason}"
        return f"{file}:{line}: {self.reason} (byte {self.byte_offset:,} of the text)"


def bad_lines(count: int) -> str:
    """That many bad lines, in words."""
    return f"{count:,} bad line{'s' if count != 1 else ''}"


@dataclass(frozen=True)
class Reading:
    """How the lines and rows of a corpus are to be read.

    Attributes:
        text_key: where the text stands, as a dotted path.
        subset_key: where the subset's name stands, as a dotted path.
        default_subset: the subset of documents that name none.
        max_document_bytes: a longer line, row or text file is a bad line.
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
        """Why a longer document is refused."""
        return f"longer than {self.max_document_bytes:,} bytes; raise max_document_bytes"


class Unusable(Exception):
    """Why a line or row is no document."""


def parse(line: bytes, reading: Reading, number: int, offset: int) -> Document:
    """The document in one line of JSON.

    Raises:
        Unusable: it is none.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        # Slower, more lenient (NaN) and with the better reasons: what it accepts is accepted.
        return document(_parse_slowly(line), reading, number, offset)
    return document(record, reading, number, offset, unicode=True)  # or it had refused the line


def _parse_slowly(line: bytes) -> Any:
    try:
        return json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        raise Unusable(
            f"invalid UTF-8: byte 0x{line[error.start]:02x} at position {error.start} of the line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Unusable(f"not JSON ({error})") from None


def document(
    record: Any, reading: Reading, number: int, offset: int, unicode: bool = False
) -> Document:
    """The document in one decoded line or row; `unicode`: its texts are known to be valid.

    Raises:
        Unusable: it is none.
    """
    text = record
    for key in reading.text_path:
        if not isinstance(text, dict):
            raise Unusable(
                f"expected an object with the key {reading.text_key!r}, found {_kind_of(record)}"
                if text is record
                else f"no key {reading.text_key!r} ({key!r} is looked for in {_kind_of(text)})"
            )
        if key not in text:
            keys = ", ".join(repr(key) for key in list(text)[:8]) or "none"
            raise Unusable(f"no key {reading.text_key!r} (keys found: {keys})")
        text = text[key]
    if not isinstance(text, str):
        raise Unusable(f"{reading.text_key!r} must be a string, found {_kind_of(text)}")
    if not unicode and not text.isascii():
        _check_unicode(text, reading.text_key)
    subset = record
    for key in reading.subset_path:
        subset = subset.get(key) if isinstance(subset, dict) else None
    if not isinstance(subset, str) or not subset or not subset.isprintable():
        subset = reading.default_subset
    return Document(text, subset, number, offset)


def _check_unicode(text: str, key: str) -> None:
    """Refuses what tiktoken would replace silently; the text would no longer be the text.

    Raises:
        Unusable: a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unusable(
            f"{key!r} holds the lone surrogate U+{ord(text[error.start]):04X} "
            f"at character {error.start}, which is no valid Unicode"
        ) from None


def _kind_of(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a text",
        bytes: "bytes",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "a value")
