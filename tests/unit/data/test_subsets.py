"""Location of the subset name in records, and behavior if no record has one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.prepare import merge, prepare
from leviathan.data.prepare.hub import HubSource
from leviathan.data.prepare.readers import read, record_schema
from leviathan.data.prepare.records import NO_SUBSET, Document, RecordSchema
from leviathan.data.prepare.sources import FileSource, find_splits

Config = Callable[..., PrepConfig]

NAMES = ["Alpha", "Beta", "Beta", "Alpha", "Beta"]


def parquet(path: Path, **columns: Any) -> Path:
    texts = [f"text {number}" for number in range(len(NAMES))]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts} | columns), path)
    return path


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def as_map(path: Path) -> Path:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    metas = [[("url", "x"), ("pile_set_name", name)] for name in NAMES]
    return parquet(path, meta=pyarrow.array(metas, kind))


def as_map_of_structs(path: Path) -> Path:
    """The path continues inside of the map's values."""
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct({"pile_set_name": pyarrow.string()}))
    return parquet(
        path, record=pyarrow.array([[("meta", {"pile_set_name": n})] for n in NAMES], kind)
    )


def as_json_text(path: Path) -> Path:
    return parquet(path, meta=[json.dumps({"pile_set_name": n, "x": float("nan")}) for n in NAMES])


def as_dictionary_of_json_text(path: Path) -> Path:
    metas = pyarrow.array([json.dumps({"pile_set_name": name}) for name in NAMES])
    return parquet(path, meta=metas.dictionary_encode())


def as_flat_column(path: Path) -> Path:
    return parquet(path, **{"meta.pile_set_name": NAMES})


def as_flat_column_beside_a_struct(path: Path) -> Path:
    return parquet(path, meta=[{"url": "x"}] * len(NAMES), **{"meta.pile_set_name": NAMES})


def as_struct(path: Path) -> Path:
    return parquet(path, meta=[{"pile_set_name": name} for name in NAMES])


def as_flat_key(path: Path) -> Path:
    return jsonl(path, *({"text": str(n), "meta.pile_set_name": n} for n in NAMES))


def as_text_in_a_key(path: Path) -> Path:
    return jsonl(path, *({"text": str(n), "meta": json.dumps({"pile_set_name": n})} for n in NAMES))


FORMS = {
    form.__name__: form
    for form in (
        as_map,
        as_json_text,
        as_dictionary_of_json_text,
        as_flat_column,
        as_flat_column_beside_a_struct,
        as_struct,
        as_flat_key,
        as_text_in_a_key,
    )
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_subset_is_read(tmp_path: Path, form: str, config: Config) -> None:
    path = FORMS[form](tmp_path / "a.parquet")
    items = [item for item in read(FileSource(path)) if isinstance(item, Document)]
    assert [item.subset for item in items] == NAMES
    assert {item.no_subset for item in items} == {None}
    source = {"paths": [str(path)], "subsets": {"exclude": ["Alpha"]}}
    result = prepare(config(source=source))
    assert (result["documents"], result["excluded"], result["subsets"]) == (3, 2, ["Beta"])


def test_a_path_through_a_map_and_a_struct(tmp_path: Path) -> None:
    path = as_map_of_structs(tmp_path / "a.parquet")
    reading = RecordSchema(subset_key="record.meta.pile_set_name")
    items = [item for item in read(FileSource(path), reading=reading) if isinstance(item, Document)]
    assert [item.subset for item in items] == NAMES


def test_texts_are_found_in_the_same_forms(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    columns = {
        "map": pyarrow.array([[("body", "x")]], kind),
        "json": ['{"body": "x"}'],
        "flat.body": ["x"],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for key in ("map.body", "json.body", "flat.body"):
        (item,) = read(FileSource(tmp_path / "a.parquet"), reading=RecordSchema(text_key=key))
        assert isinstance(item, Document), item
        assert item.text == "x"
    lone = jsonl(tmp_path / "a.jsonl", {"doc": '{"body": "\\ud800"}'})
    (item,) = read(FileSource(lone), reading=RecordSchema(text_key="doc.body"))
    assert not isinstance(item, Document)
    assert "lone surrogate" in item.reason


# ---------------------------------------------------------------- none is found


def nameless(path: Path, count: int = 3) -> Path:
    return jsonl(path, *({"text": f"text {number}"} for number in range(count)))


def test_no_record_names_a_subset(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    path = nameless(tmp_path / "a.jsonl")
    assert prepare(config(source={"paths": [str(path)]}))["subsets"] == [NO_SUBSET]
    messages = capsys.readouterr().err
    assert "none of 3 records has a subset name at source.subset_key=meta.pile_set_name" in messages


@pytest.mark.parametrize("executor", ["local", "rank"])
@pytest.mark.parametrize(
    ("filters", "key"),
    [
        ({"include": ["Alpha"]}, "source.subsets.include"),
        ({"exclude": ["Alpha"]}, "source.subsets.exclude"),
        ({"mixing": {"Alpha": 2.0}}, "mixing"),
    ],
)
def test_filters_without_names_are_refused(
    tmp_path: Path,
    config: Config,
    filters: dict[str, Any],
    key: str,
    executor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [str(nameless(tmp_path / f"{number}.jsonl")) for number in range(2)]
    subsets = {name: value for name, value in filters.items() if name != "mixing"}
    wanted = config(
        source={"paths": paths, "subsets": subsets},
        mixing=filters.get("mixing", {}),
        executor=executor,
    )
    if executor == "rank":
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
            prepare(wanted)
        with raises_error("prep.no_subsets", key, 6):
            merge(wanted.out, [])
    else:
        for _ in range(2):  # the second time, of the parts that the first one left
            with raises_error("prep.no_subsets", key, 6):
                prepare(wanted)
    assert not (wanted.out / "dataset.json").exists()


def test_filters_of_the_default_subset_need_no_names(tmp_path: Path, config: Config) -> None:
    path = nameless(tmp_path / "a.jsonl")
    source = {"paths": [str(path)], "default_subset": "web", "subsets": {"include": ["web"]}}
    result = prepare(config(source=source, mixing={"web": 2.0}))
    assert (result["documents"], result["subsets"]) == (6, ["web"])


def test_filters_of_plain_texts_are_refused(tmp_path: Path, config: Config) -> None:
    (tmp_path / "a.txt").write_text("a")
    source = {"paths": [str(tmp_path / "a.txt")], "subsets": {"exclude": ["Alpha"]}}
    with raises_error("prep.no_subsets"):
        prepare(config(source=source))


def test_plain_texts_are_not_warned_of(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a")
    prepare(config(source={"paths": [str(tmp_path / "a.txt")]}))
    assert "has a subset name" not in capsys.readouterr().err


def test_a_file_without_names_beside_others_is_named(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = nameless(tmp_path / "a.jsonl"), as_flat_key(tmp_path / "b.jsonl")
    source = {"paths": [str(one), str(other)], "subsets": {"exclude": ["Alpha"]}}
    assert prepare(config(source=source))["documents"] == 6
    assert f"no record in {one} has a subset name" in capsys.readouterr().err


def test_records_without_a_name_among_others_are_counted(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    path = parquet(
        tmp_path / "a.parquet", meta=['{"pile_set_name": "Alpha"}', "no JSON"] + [None] * 3
    )
    source = {"paths": [str(path)], "subsets": {"exclude": ["Alpha"]}}
    assert prepare(config(source=source))["documents"] == 4
    assert "4 records have no subset name at source.subset_key=meta" in capsys.readouterr().err


def test_validation_on_texts_that_are_trained_on_is_warned_of(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    one = nameless(tmp_path / "a.jsonl", 9)
    copy = tmp_path / "held_out.jsonl"
    copy.write_bytes(one.read_bytes())
    validation = {"paths": [str(copy)]}
    prepare(config(source={"paths": [str(one)]}, validation=validation))
    shown = " ".join(capsys.readouterr().err.split())
    assert "the validation loss is computed on training texts" in shown


@pytest.mark.parametrize(
    ("value", "kind"),
    [(7, "a number"), ("", "an empty text"), ("a\0", "a text with control"), (["x"], "a list")],
)
def test_something_that_is_no_name_is_reported(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str], value: Any, kind: str
) -> None:
    records = [{"text": "x", "meta": {"pile_set_name": name}} for name in ("Alpha", value, value)]
    path = jsonl(tmp_path / "a.jsonl", *records)
    assert prepare(config(source={"paths": [str(path)]}))["subsets"] == ["Alpha", NO_SUBSET]
    messages = capsys.readouterr().err
    assert (
        "warning: 2 records have an invalid subset name at source.subset_key=meta.pile_set_name"
        in messages
    )
    assert f"the first is {path}:2: {kind}" in messages


def test_a_number_as_subset_of_every_row(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    path = parquet(tmp_path / "a.parquet", source=list(range(5)))
    keys = {"paths": [str(path)], "subset_key": "source"}
    prepare(config(source=keys))
    messages = capsys.readouterr().err
    assert f"the first is {path}: row 1: a number" in messages
    assert "none of 5 records has a subset name at source.subset_key=source:" in messages


def test_parts_of_an_earlier_version_are_looked_at_again(tmp_path: Path, config: Config) -> None:
    """That version found no subset in a flat key, so its parts have none."""
    flat, plain = (
        as_flat_key(tmp_path / "a.jsonl"),
        jsonl(tmp_path / "b.jsonl", {"text": "x", "meta": {"pile_set_name": "Gamma"}}),
    )
    wanted = config(source={"paths": [str(flat), str(plain)]}, mixing={"Nowhere": 1.0})
    with raises_error("prep.unknown_subset", "Nowhere"):
        prepare(wanted)
    parts = sorted((wanted.out / ".prep/parts").iterdir())
    for part, subsets in zip(parts, (["unnamed"], ["Gamma"]), strict=True):
        info = json.loads((part / "part.json").read_bytes())
        for key in ("named", "unnamed", "misnamed", "misnamed_example"):
            del info[key]
        (part / "part.json").write_text(json.dumps(info | {"subsets": subsets}))
    kept = parts[1].stat().st_ino
    with raises_error("prep.unknown_subset"):
        prepare(wanted)
    assert parts[1].stat().st_ino == kept
    result = prepare(wanted.model_copy(update={"mixing": {}}))
    assert result["subsets"] == ["Alpha", "Beta", "Gamma"]


# ---------------------------------------------------------------- the Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    folder.mkdir()
    for split, count in (("train", 3), ("validation", 2), ("test", 1)):
        rows = [{"body": f"{split} {n}", "info": {"kind": f"k{n % 2}"}} for n in range(count)]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return folder


def test_validation_is_read_as_its_source(config: Config, hub: Path) -> None:
    keys = {"id": str(hub), "text_column": "body", "subset_column": "info.kind"}
    held_out = {"hub": {"id": str(hub), "split": "validation"}}
    wanted = config(source={"hub": keys}, validation=held_out)
    assert wanted == PrepConfig.model_validate(wanted.model_dump(mode="json"), strict=False)
    assert prepare(wanted)["subsets"] == ["k0", "k1"]
    subsets = DatasetInfo.load(wanted.out).splits["val"].subsets
    assert {name: size.documents for name, size in subsets.items()} == {"k0": 1, "k1": 1}
    own = config(
        source={"hub": keys}, validation={"hub": held_out["hub"] | {"subset_column": "other"}}
    )
    assert own.validation.hub is not None
    assert own.validation.hub.subset_column == "other"
    with raises_error("hub.no_column", "validation.hub", "other"):
        find_splits(own)


@pytest.mark.parametrize(
    ("split", "names", "documents"),
    [("train+test", ["train", "test"], 4), ("test + train", ["test", "train"], 4)],
)
def test_several_splits_of_the_hub(
    config: Config, hub: Path, split: str, names: list[str], documents: int
) -> None:
    wanted = config(source={"hub": {"id": str(hub), "text_column": "body", "split": split}})
    sources = [source for source, _ in find_splits(wanted)]
    assert [source.hub.split for source in sources if isinstance(source, HubSource)] == names
    reading = record_schema(sources[0], wanted)
    assert len([item for source in sources for item in read(source, reading=reading)]) == 4
    assert prepare(wanted)["documents"] == documents


def test_splits_of_the_hub_that_are_no_splits(config: Config, hub: Path) -> None:
    keys = {"id": str(hub), "text_column": "body"}
    assert len(find_splits(config(source={"hub": keys | {"split": "all"}}))) == 3
    for split, message in [
        ("train+train", ("hub.duplicate_split",)),
        ("train+nowhere", ("hub.not_loaded", "nowhere")),
        ("train[:1]", ("hub.not_loaded", "train[:1]")),
    ]:
        with raises_error(*message):
            find_splits(config(source={"hub": keys | {"split": split}}))


def test_a_split_that_is_held_out_is_not_trained_on(config: Config, hub: Path) -> None:
    keys = {"id": str(hub), "text_column": "body", "split": "train+validation"}
    held_out = {"hub": {"id": str(hub), "split": "validation"}}
    result = prepare(config(source={"hub": keys}, validation=held_out))
    assert result["splits"]["train"]["documents"] == 3
    assert result["splits"]["val"]["documents"] == 2
