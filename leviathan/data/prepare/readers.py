"""Reads documents from corpus files: decompression, plain text, Parquet and JSON lines.

The format of a file is detected by its first bytes; the suffix is only used in messages.
"""

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, Literal

from typing_extensions import override

from leviathan.config.data import PrepConfig
from leviathan.data.prepare.hub import HubSource, read_hub
from leviathan.data.prepare.records import (
    Document,
    InvalidRecord,
    RecordSchema,
    RejectedRecord,
    Unreadable,
    document,
    parse,
)
from leviathan.data.prepare.sources import TEXT_SUFFIXES, ByteSource, FileSource, Source
from leviathan.errors import DataError

Kind = Literal["jsonl", "zst", "gz", "parquet", "empty"]

BOM = b"\xef\xbb\xbf"
OnBytes = Callable[[int], Any] | None
BUFFER = 1 << 20
AGAIN = "download or copy it again"  # the remedy for incomplete files
_PACKED = 1 << 17  # compressed bytes read at once
_WINDOW_LOG = 31  # `zstd --long=31`; by default, the library rejects windows above 2^27


def sniff(source: ByteSource) -> Kind:
    """Detects the format of `source` by its first bytes; the suffix is only used in messages.

    Raises:
        DataError: it is unreadable, or a format that is often confused with one.
    """
    with named(source), source.open() as file:
        head = file.read(512)
    kind = packing(head)
    if kind is None:
        problem = not_text(head)
        start = head.removeprefix(BOM).lstrip()
        packed = source.suffix in (".zst", ".zstd", ".gz", ".parquet")
        if problem is None and packed and not start.startswith(b"{"):
            problem = f"not a {source.suffix[1:]} file (it begins with {head[:8]!r})"
        if problem is None and b"\0" in head:
            problem = f"a binary file of an unsupported format (it begins with {head[:8]!r})"
        if problem is not None:
            raise DataError("source.corrupt", f"{source.name}: {problem}")
    return kind or "jsonl"


def packing(head: bytes) -> Kind | None:
    """The compression of a file that begins with `head`, if known."""
    if not head:
        return "empty"
    # A zstd file may begin with a skippable frame.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (0x50 <= head[0] <= 0x5F and head[1:4] == b"*M\x18"):
        return "zst"
    if head.startswith(b"\x1f\x8b"):
        return "gz"
    return "parquet" if head.startswith(b"PAR1") else None


def not_text(head: bytes) -> str | None:
    """Names the format of a file that begins with `head`; None if it may be a corpus file."""
    start = head.removeprefix(BOM).lstrip()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the data: run `git lfs pull`"
    if start[:15].lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page, not the data: the download went wrong"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text; a corpus file must be UTF-8"
    return None


@contextmanager
def named(source: ByteSource) -> Iterator[None]:
    """Converts errors of reading `source` to a DataError that names it."""
    try:
        yield
    except gzip.BadGzipFile as error:
        raise DataError(
            "source.corrupt", f"{source.name}: corrupt gzip file ({error}); {AGAIN}"
        ) from None
    except OSError as error:
        raise DataError(
            "source.unreadable", f"{source.name}: cannot be read ({error.strerror or error})"
        ) from None
    except EOFError:
        raise DataError(
            "source.truncated",
            f"{source.name}: truncated gzip file: it ends in the middle of a stream; {AGAIN}",
        ) from None
    except zlib.error as error:
        raise DataError(
            "source.corrupt", f"{source.name}: corrupt gzip file ({error}); {AGAIN}"
        ) from None


def unpack(
    source: ByteSource,
    kind: Kind,
    file: IO[bytes],
    on_bytes: Callable[[int], Any] | None = None,
    digest: Any = None,
) -> io.BufferedReader:
    """Yields the decompressed bytes of `file`; counts and hashes the compressed ones."""
    tap = _HashingReader(file, on_bytes, digest)
    if kind == "zst":
        return io.BufferedReader(_ZstdFrames(source.name, tap), BUFFER)
    if kind == "gz":
        packed = io.BufferedReader(tap, BUFFER)
        return io.BufferedReader(gzip.GzipFile(fileobj=packed), BUFFER)  # pyright: ignore
    return io.BufferedReader(tap, BUFFER)


class _HashingReader(io.RawIOBase):
    """Yields the bytes of an uncompressed file; counts and hashes them."""

    def __init__(self, raw: IO[bytes], on_bytes: Callable[[int], Any] | None, digest: Any) -> None:
        self._raw, self._on_bytes, self._digest = raw, on_bytes, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0  # pyright: ignore[reportAttributeAccessIssue]
        if self._digest is not None:
            self._digest.update(memoryview(buffer)[:count])
        if self._on_bytes is not None and count:
            self._on_bytes(count)
        return count


class _ZstdFrames(io.RawIOBase):
    """Decompresses every frame of a zstd file; detects a truncated last frame."""

    def __init__(self, name: str, packed: io.RawIOBase) -> None:
        from backports import zstd

        self._name, self._packed, self._error = name, packed, zstd.ZstdError
        options = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}
        self._new_frame = lambda: zstd.ZstdDecompressor(options=options)
        self._frame: Any = None
        self._rest = b""  # compressed bytes of the next frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._frame is None or self._frame.needs_input:
                packed = self._rest or self._packed.read(_PACKED) or b""
                self._rest = b""
                if not packed and self._frame is not None:
                    raise DataError(
                        "source.truncated",
                        f"{self._name}: truncated: the last zstd frame is incomplete; {AGAIN}",
                    )
                if not packed:
                    return 0
                self._frame = self._frame or self._new_frame()
            else:
                packed = b""  # the decompressor still has output to return
            try:
                unpacked = self._frame.decompress(packed, len(buffer))
            except self._error as error:
                raise DataError(
                    "source.corrupt", f"{self._name}: corrupt zstd file ({error}); {AGAIN}"
                ) from None
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
            if unpacked:
                memoryview(buffer)[: len(unpacked)] = unpacked
                return len(unpacked)


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


_BATCH_BYTES = 1 << 23  # rows decoded at once, estimated from their mean size
_BATCH_ROWS = 1024


def read_parquet(
    source: ByteSource, reading: RecordSchema, on_bytes: OnBytes, digest: Any
) -> Iterator[Document | RejectedRecord]:
    """Yields the documents of a parquet file; `line` is the number of the row.

    Raises:
        DataError: the file is corrupt or has no text column.
    """
    if not isinstance(source, FileSource):  # parquet needs random access: download the file once
        with NamedTemporaryFile(suffix=".parquet") as copy:
            with source.open() as remote:
                while block := remote.read(BUFFER):
                    copy.write(block)
            copy.flush()
            local = FileSource(Path(copy.name))
            yield from _read_local(source.name, local, reading, on_bytes, digest)
    else:
        yield from _read_local(source.name, source, reading, on_bytes, digest)


def _read_local(
    name: str, source: FileSource, reading: RecordSchema, on_bytes: OnBytes, digest: Any
) -> Iterator[Document | RejectedRecord]:
    import pyarrow
    import pyarrow.parquet

    if digest is not None:
        with source.open() as file:
            while block := file.read(BUFFER):
                digest.update(block)
    try:
        with pyarrow.parquet.ParquetFile(
            source.path, page_checksum_verification=True, pre_buffer=False, buffer_size=BUFFER
        ) as table:
            columns = needed_columns(table.schema_arrow, name, reading)
            number, total = 0, max(1, table.metadata.num_rows)
            groups = [table.metadata.row_group(n) for n in range(table.metadata.num_row_groups)]
            unpacked = sum(group.total_byte_size for group in groups)
            batch_size = max(1, min(_BATCH_ROWS, _BATCH_BYTES * total // max(1, unpacked)))
            for batch in table.iter_batches(batch_size=batch_size, columns=columns):
                for row in _rows(batch):
                    number += 1
                    yield _document(row, reading, number)
                if on_bytes is not None:
                    on_bytes(round(source.size() / total * batch.num_rows))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an OS error; a wrong checksum is an OSError without errno
        raise DataError(
            "source.corrupt", f"{name}: corrupt parquet file ({error}); {AGAIN}"
        ) from None


def needed_columns(schema: Any, name: str, reading: RecordSchema) -> list[str]:
    """The columns of a pyarrow schema that contain text and subset, as dotted paths.

    Raises:
        DataError: there is no text column, or several columns have the same name.
    """
    paths = {reading.text_key: reading.text_path, reading.subset_key: reading.subset_path}
    for column in [each for key, path in paths.items() for each in (path[0], key)]:
        if schema.names.count(column) > 1:
            raise DataError(
                "source.duplicate_column",
                f"{name}: {schema.names.count(column)} columns are named {column!r}",
            )
    text = _columns_at(schema, reading.text_path, reading.text_key)
    if not text:
        found = ", ".join(_leaves(schema))
        raise DataError(
            "source.no_column", f"{name}: no column {reading.text_key!r} (columns: {found})"
        )
    return list(
        dict.fromkeys([*text, *_columns_at(schema, reading.subset_path, reading.subset_key)])
    )


def _columns_at(schema: Any, path: tuple[str, ...], key: str) -> list[str]:
    """The columns that may contain the value: that of the path, and the one named `key`."""
    import pyarrow.types as types

    found = [key] if key in schema.names else []
    if path[0] not in schema.names:
        return found
    type_ = schema.field(path[0]).type
    for depth, name in enumerate(path[1:], 1):
        if types.is_struct(type_):
            place = type_.get_field_index(name)
            if place < 0:
                return found
            type_ = type_.field(place).type
        elif types.is_map(type_) or _is_text(type_):
            return list(dict.fromkeys([".".join(path[:depth]), *found]))
        else:
            return found
    return list(dict.fromkeys([".".join(path), *found]))


def _is_text(type_: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(type_):
        type_ = type_.value_type
    return types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_)


def _leaves(fields: Any, prefix: str = "") -> list[str]:
    """The names of the columns; fields of structs as dotted paths."""
    import pyarrow.types as types

    names: list[str] = []
    for field in fields:
        if types.is_struct(field.type):
            names += _leaves(field.type, f"{prefix}{field.name}.") or [prefix + field.name]
        else:
            names.append(prefix + field.name)
    return names


def _rows(batch: Any) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except Exception:  # raised for the full batch if one value cannot be converted
        return [
            {
                name: _value(column[row])
                for name, column in zip(batch.schema.names, batch, strict=True)
            }
            for row in range(batch.num_rows)
        ]


def _value(scalar: Any) -> Any:
    """A pyarrow scalar as a Python value, with `Unreadable` for values that cannot be converted."""
    import pyarrow

    try:
        return scalar.as_py()
    except Exception as error:  # the type of the exception depends on the value
        if isinstance(scalar, pyarrow.StructScalar):
            return {name: _value(scalar[name]) for name in scalar}
        if isinstance(scalar, pyarrow.MapScalar):
            return [(_value(pair[0]), _value(pair[1])) for pair in scalar.values]
        if isinstance(error, UnicodeDecodeError):
            byte = error.object[error.start]
            return Unreadable(
                f"invalid UTF-8: byte 0x{byte:02x} at position {error.start} of the text"
            )
        return Unreadable(f"a value that cannot be read ({error})")


def _document(row: Any, reading: RecordSchema, number: int) -> Document | RejectedRecord:
    try:
        found = document(row, reading, number, None)
    except InvalidRecord as error:
        return RejectedRecord(number, None, str(error))
    limit = reading.max_document_bytes
    if len(found.text) * 4 > limit and len(found.text.encode()) > limit:
        return RejectedRecord(number, None, reading.too_long)
    return found


def record_schema(source: Source, config: PrepConfig) -> RecordSchema:
    """Location of text and subset in the records of `source`, and the size limit."""
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
