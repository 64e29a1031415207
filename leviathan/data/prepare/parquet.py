"""Reader of parquet files; reads only the columns of text and subset.

A path such as `meta.pile_set_name` leads through structs, maps, and strings that contain a JSON
object; a column may also have the full path as its name. A value that cannot be decoded only
rejects its record.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from leviathan.data.prepare.records import (
    Document,
    InvalidRecord,
    RecordSchema,
    RejectedRecord,
    Unreadable,
    document,
)
from leviathan.data.prepare.source import ByteSource, FileSource
from leviathan.data.prepare.unpack import AGAIN, BUFFER
from leviathan.errors import DataError

_BATCH_BYTES = 1 << 23  # rows decoded at once, estimated from their mean size
_BATCH_ROWS = 1024

OnBytes = Callable[[int], Any] | None


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
