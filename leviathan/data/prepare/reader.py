"""Reads documents out of corpus files, line by line, and says exactly what is wrong with a line.

What a file is, its first bytes decide, not its name. A damaged file (cut off, bad checksum, not
text at all) is a `DataError`; a damaged *line* is handed on as a `BadLine`, for the caller to
refuse or set aside. Memory is bounded by the longest line.
"""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

from leviathan.data.prepare.sources import ByteSource, Source
from leviathan.errors import DataError

NO_SUBSET = "unnamed"  # documents without meta.pile_set_name

Kind = Literal["jsonl", "zst", "gz", "parquet", "empty"]

_ZSTD_CHUNK = 1 << 17  # compressed bytes fed at once; bounds what one call can unpack to
_BUFFER = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """One text and the subset (`meta.pile_set_name`) it belongs to; `text` may be empty."""

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
        return f"{source.name}:{self.line}: {self.reason} (byte {self.byte_offset:,} of the text)"


def read(
    source: Source,
    on_bytes: Callable[[int], Any] | None = None,
    digest: "hashlib._Hash | None" = None,
) -> Iterator[Document | BadLine]:
    """Yields the documents and bad lines of one source, in order; blank lines are skipped.

    Args:
        source: jsonl, plain or packed as zst (every frame) or gz, or parquet, with the columns
            `text` and, optionally, `meta`.
        on_bytes: told the number of file bytes read, as they are read.
        digest: fed with every byte of the file.

    Raises:
        DataError: unreadable, truncated, damaged, or not a corpus file at all.
    """
    assert isinstance(source, ByteSource)
    kind = sniff(source)
    try:
        if kind == "parquet":
            yield from _read_parquet(source, on_bytes, digest)
        elif kind != "empty":
            with source.open() as raw:
                tap = _Tap(raw, on_bytes, digest)
                yield from _read_lines(_unpack(source.name, kind, tap))
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise DataError(f"{source.name}: damaged gzip file ({error})") from None
        raise DataError(f"{source.name}: cannot be read ({error})") from None
    except EOFError:
        raise DataError(
            f"{source.name}: truncated gzip file: it ends in the middle of a stream"
        ) from None
    except zlib.error as error:
        raise DataError(f"{source.name}: damaged gzip file ({error})") from None


def sniff(source: ByteSource) -> Kind:
    """What `source` is, by its first bytes.

    Raises:
        DataError: unreadable, or something that people often take for a corpus file.
    """
    try:
        with source.open() as file:
            head = file.read(512)
    except OSError as error:
        raise DataError(f"{source.name}: cannot be read ({error.strerror})") from None
    if not head:
        return "empty"
    if head.startswith(b"\x28\xb5\x2f\xfd") or (0x50 <= head[0] <= 0x5F and head[1:4] == b"*M\x18"):
        return "zst"
    if head.startswith(b"\x1f\x8b"):
        return "gz"
    if head.startswith(b"PAR1"):
        return "parquet"
    start = head.removeprefix(_BOM).lstrip()
    if start.startswith(b"version https://git-lfs"):
        raise DataError(f"{source.name}: a Git LFS pointer, not the data: run `git lfs pull`")
    if start[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise DataError(f"{source.name}: an HTML page, not the data: the download went wrong")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{source.name}: UTF-16 text; a corpus file must be UTF-8")
    if source.suffix in (".zst", ".zstd", ".gz", ".parquet") and not start.startswith(b"{"):
        raise DataError(
            f"{source.name}: not a {source.suffix[1:]} file (it begins with {head[:8]!r})"
        )
    if b"\0" in head:
        raise DataError(
            f"{source.name}: a binary file of no kind we read (it begins with {head[:8]!r})"
        )
    return "jsonl"


# ---------------------------------------------------------------- bytes


class _Tap(io.RawIOBase):
    """Passes the bytes of a raw file on, counting and hashing them."""

    def __init__(
        self,
        raw: IO[bytes],
        on_bytes: Callable[[int], Any] | None,
        digest: "hashlib._Hash | None",
    ) -> None:
        self._raw, self._on_bytes, self._digest = raw, on_bytes, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0  # pyright: ignore[reportAttributeAccessIssue]
        if self._digest is not None:
            self._digest.update(memoryview(buffer)[:count])
        if self._on_bytes is not None:
            self._on_bytes(count)
        return count


class _ZstdFrames(io.RawIOBase):
    """Unpacks every frame of a zstd file and notices when the last one is cut off.

    python-zstandard's own readers stop silently after the first frame or at a truncation.
    """

    def __init__(self, name: str, packed: io.RawIOBase) -> None:
        import zstandard

        self._name, self._packed = name, packed
        # zstd --long=31 needs a window of 2 GiB; the default refuses such frames.
        self._context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._unpacked = memoryview(b"")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            if not self._rest:
                self._rest = self._packed.read(_ZSTD_CHUNK) or b""
            if not self._rest:
                if self._frame is not None:
                    raise DataError(f"{self._name}: truncated: the last zstd frame does not end")
                return 0
            self._unpack()
        count = min(len(buffer), len(self._unpacked))
        memoryview(buffer)[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = self._context.decompressobj()
        try:
            self._unpacked = memoryview(self._frame.decompress(self._rest))
        except self._error as error:
            raise DataError(f"{self._name}: damaged zstd file ({error})") from None
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None


def _unpack(name: str, kind: Kind, tap: _Tap) -> io.BufferedReader:
    if kind == "zst":
        return io.BufferedReader(_ZstdFrames(name, tap), _BUFFER)
    if kind == "gz":
        packed = io.BufferedReader(tap, _BUFFER)
        return io.BufferedReader(gzip.GzipFile(fileobj=packed), _BUFFER)  # pyright: ignore
    return io.BufferedReader(tap, _BUFFER)


# ---------------------------------------------------------------- lines


def _read_lines(text: io.BufferedReader) -> Iterator[Document | BadLine]:
    offset = 0
    for number, line in enumerate(text, 1):
        content = line.removeprefix(_BOM) if number == 1 else line
        if content.strip():
            try:
                yield _parse(content, number, offset)
            except _Unusable as error:
                yield BadLine(number, offset, str(error))
        offset += len(line)


class _Unusable(Exception):
    """Why a line or row is no document."""


def _parse(line: bytes, number: int, offset: int) -> Document:
    try:
        record = json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        raise _Unusable(
            f"invalid UTF-8: byte 0x{line[error.start]:02x} at position {error.start} of the line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _Unusable(f"expected an object with the key 'text', found {_kind_of(record)}")
    if "text" not in record:
        keys = ", ".join(repr(key) for key in list(record)[:8]) or "none"
        raise _Unusable(f"no key 'text' (keys found: {keys})")
    return _document(record["text"], record.get("meta"), number, offset)


def _document(text: Any, meta: Any, number: int, offset: int) -> Document:
    if not isinstance(text, str):
        raise _Unusable(f"'text' must be a string, found {_kind_of(text)}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # tiktoken would replace it silently; the text would no longer be the text.
            raise _Unusable(
                f"'text' holds the lone surrogate U+{ord(text[error.start]):04X} "
                f"at character {error.start}, which is no valid Unicode"
            ) from None
    subset = meta.get("pile_set_name") if isinstance(meta, dict) else None
    if not isinstance(subset, str) or not subset or not subset.isprintable():
        subset = NO_SUBSET
    return Document(text, subset, number, offset)


def _kind_of(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value)) or {list: "a list", dict: "an object"}.get(type(value), "a text")


def _read_parquet(
    source: ByteSource, on_bytes: Callable[[int], Any] | None, digest: "hashlib._Hash | None"
) -> Iterator[Document | BadLine]:
    import pyarrow
    import pyarrow.parquet

    if digest is not None:
        with source.open() as file:
            while block := file.read(_BUFFER):
                digest.update(block)
    try:
        with (
            source.open() as file,
            pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table,
        ):
            names = table.schema_arrow.names
            if "text" not in names:
                raise DataError(f"{source.name}: no column 'text' (columns: {', '.join(names)})")
            columns = [name for name in ("text", "meta") if name in names]
            rows, share = 0, (source.size() or 0) / max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    rows += 1
                    try:
                        yield _document(row["text"], row.get("meta"), rows, 0)
                    except _Unusable as error:
                        yield BadLine(rows, 0, str(error))
                if on_bytes is not None:
                    on_bytes(round(share * batch.num_rows))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's word on the file; a bad checksum is an OSError without a number
        raise DataError(f"{source.name}: damaged parquet file ({error})") from None
