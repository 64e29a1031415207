"""Parquet files: only required columns are read, and an invalid value affects only its record."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.data.prepare import prepare
from leviathan.data.prepare.readers import needed_columns, read
from leviathan.data.prepare.records import Document, RecordSchema, RejectedRecord
from leviathan.data.prepare.sources import FileSource
from leviathan.data.tokenizer import train_bpe

Config = Callable[..., PrepConfig]

ROWS, BAD = 40, 9  # the tenth row
BEYOND_9999 = 253_402_300_800_000_000  # microseconds from 1970 to the year 10000


def texts() -> list[str]:
    return [f"Row number {number} says that water is wet." for number in range(ROWS)]


def latin_1(values: list[str]) -> Any:
    """A string column in which one value has a byte of another encoding."""
    encoded = [value.encode() for value in values]
    encoded[BAD] = b"caf\xe9 au lait"
    ends = np.cumsum([0, *map(len, encoded)]).astype("<i4")
    buffers = [None, pyarrow.py_buffer(ends.tobytes()), pyarrow.py_buffer(b"".join(encoded))]
    return pyarrow.Array.from_buffers(pyarrow.string(), ROWS, buffers)


def dates() -> Any:
    """A column of dates, one of them later than Python's calendar ends."""
    values = [0] * ROWS
    values[7] = BEYOND_9999
    return pyarrow.array(values, pyarrow.timestamp("us"))


def subsets() -> list[str]:
    return ["Beta" if number % 2 else "Alpha" for number in range(ROWS)]


def write(path: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=25)
    return path


def struct(**children: Any) -> Any:
    return pyarrow.StructArray.from_arrays(list(children.values()), names=list(children))


def documents(path: Path, **keys: Any) -> list[Document]:
    items = list(read(FileSource(path), reading=RecordSchema(**keys)))
    assert not [item for item in items if isinstance(item, RejectedRecord)]
    return [item for item in items if isinstance(item, Document)]


@pytest.fixture
def bad_text(tmp_path: Path) -> Path:
    meta = struct(pile_set_name=pyarrow.array(subsets()))
    return write(tmp_path / "bad.parquet", text=latin_1(texts()), meta=meta)


# ---------------------------------------------------------------- bad values


def test_a_text_that_is_not_utf8_is_one_bad_row(bad_text: Path, config: Config) -> None:
    source = {"paths": [str(bad_text)]}
    message = ("record.rejected", "bad.parquet", "10", "0xe9", "text")
    with raises_error(*message):
        prepare(config(source=source))
    wanted = config(source=source, on_error="quarantine", max_reject_fraction=0.1)
    result = prepare(wanted)
    assert (result["documents"], result["rejected"]) == (39, 1)
    (reject,) = [json.loads(line) for line in (wanted.out / "rejects.jsonl").open()]
    assert (reject["file"], reject["line"]) == (str(bad_text), 10)
    assert "byte 0xe9 at position 3" in reject["reason"]


def test_a_tokenizer_is_trained_on_the_other_rows(
    bad_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train_bpe([str(bad_text)], 270, tmp_path / "t.tiktoken")
    assert result["documents"] == 39
    messages = capsys.readouterr().err
    assert f"omitted {bad_text}: row 10: 'text' has invalid UTF-8: byte 0xe9" in messages


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.string_view(), "dictionary"])
def test_other_string_types(tmp_path: Path, kind: Any) -> None:
    column = latin_1(texts())
    if kind == "dictionary":
        places = pyarrow.array(range(ROWS), pyarrow.int32())
        column = pyarrow.DictionaryArray.from_arrays(places, column)
    else:
        column = column.cast(kind)
    items = list(read(FileSource(write(tmp_path / "a.parquet", text=column))))
    bad = [item for item in items if isinstance(item, RejectedRecord)]
    assert [item.line for item in bad] == [10]
    assert [item.text for item in items if isinstance(item, Document)] == [
        text for number, text in enumerate(texts()) if number != BAD
    ]


def test_a_text_inside_of_a_struct_and_beside_its_subset(tmp_path: Path) -> None:
    record = struct(body=latin_1(texts()), kind=pyarrow.array(subsets()))
    path = write(tmp_path / "a.parquet", record=record)
    reading = RecordSchema(text_key="record.body", subset_key="record.kind")
    items = list(read(FileSource(path), reading=reading))
    assert [item.line for item in items if isinstance(item, RejectedRecord)] == [10]
    assert [item.subset for item in items if isinstance(item, Document)] == [
        name for number, name in enumerate(subsets()) if number != BAD
    ]


@pytest.mark.parametrize("form", ["struct", "map", "flat"])
def test_a_subset_that_is_not_utf8_is_no_name(tmp_path: Path, form: str) -> None:
    names = latin_1(subsets())
    if form == "struct":
        columns: dict[str, Any] = {"meta": struct(pile_set_name=names)}
    elif form == "map":
        keys = pyarrow.array(["pile_set_name"] * ROWS)
        columns = {"meta": pyarrow.MapArray.from_arrays(list(range(ROWS + 1)), keys, names)}
    else:
        columns = {"meta.pile_set_name": names}
    found = documents(write(tmp_path / "a.parquet", text=texts(), **columns))
    assert [item.subset for item in found if item.no_subset is None] == [
        name for number, name in enumerate(subsets()) if number != BAD
    ]
    assert found[BAD].subset == "unnamed"
    assert "byte 0xe9 at position 3" in (found[BAD].no_subset or "")


# ---------------------------------------------------------------- what is not read


@pytest.mark.parametrize("nested", [True, False])
def test_a_date_that_nobody_needs(tmp_path: Path, nested: bool) -> None:
    names = pyarrow.array(subsets())
    if nested:
        columns = {"meta": struct(pile_set_name=names, crawled=dates())}
    else:
        columns = {"meta": struct(pile_set_name=names), "crawled": dates()}
    path = write(tmp_path / "a.parquet", text=texts(), **columns)
    with pytest.raises(OverflowError):
        pyarrow.parquet.read_table(path).to_pylist()
    found = documents(path)
    assert [item.text for item in found] == texts()
    assert [item.subset for item in found] == subsets()


def test_a_value_that_cannot_be_read_where_the_subset_is_looked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", text=texts(), crawled=dates())
    found = documents(path, subset_key="crawled")
    assert [item.no_subset for item in found[:2]] == ["a value", "a value"]
    assert "a value that cannot be read" in (found[7].no_subset or "")


@pytest.mark.parametrize(
    ("fields", "subset_key", "expected"),
    [
        ({"meta": {"a": "s", "b": "s"}}, "meta.a", ["meta.a"]),
        ({"meta": {"a": {"x": "s"}, "b": "s"}}, "meta.a.x", ["meta.a.x"]),
        ({"meta": {"a": {"x": "s"}}}, "meta.a.y", []),
        ({"meta": "s"}, "meta.a.x", ["meta"]),
        ({"meta": "map"}, "meta.a.x", ["meta"]),
        ({"meta": {"a": "map"}}, "meta.a.x", ["meta.a"]),
        ({"meta": "int"}, "meta.a", []),
        ({"meta.a": "s"}, "meta.a", ["meta.a"]),
        ({"meta.a": "s", "meta": {"b": "s"}}, "meta.a", ["meta.a"]),
        ({"meta.a": "s", "meta": "s"}, "meta.a", ["meta", "meta.a"]),
        ({"other": "s"}, "meta.a", []),
        ({}, "text", []),
    ],
)
def test_needed_columns(fields: dict[str, Any], subset_key: str, expected: list[str]) -> None:
    def kind(form: Any) -> Any:
        if isinstance(form, dict):
            return pyarrow.struct({name: kind(child) for name, child in form.items()})
        strings = pyarrow.string()
        return {"s": strings, "int": pyarrow.int64(), "map": pyarrow.map_(strings, strings)}[form]

    schema = pyarrow.schema({"text": pyarrow.string()} | {n: kind(f) for n, f in fields.items()})
    reading = RecordSchema(subset_key=subset_key)
    assert needed_columns(schema, "a.parquet", reading) == ["text", *expected]


def test_columns_that_cannot_be_told_apart(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with raises_error("source.duplicate_column", "a.parquet", "text"):
        documents(tmp_path / "a.parquet")


def test_a_missing_text_names_what_is_there(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet", id=list(range(ROWS)), doc=struct(body=pyarrow.array(texts()))
    )
    with raises_error("source.no_column", "doc.body", "doc.text"):
        documents(path, text_key="doc.text")
