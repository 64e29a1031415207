"""`leviathan data verify`: every kind of damage is found and named, in any shard."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import (
    ShardSamples,
    read_index,
    read_shard,
    shard_name,
    write_index,
    write_shard,
)
from leviathan.data.prepare import build, prepare, verify
from leviathan.data.prepare import packing as pack


@pytest.fixture(scope="module")
def whole(
    tiny_corpus: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A dataset of many shards, with rejects and two subsets."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "bad.jsonl").write_text('{"txt": 1}\n')
    keys = {
        "source": {"paths": [str(tiny_corpus), str(folder / "bad.jsonl")]},
        "validation": {"fraction": 0.2},
        "tokenizer": str(tiny_tokenizer),
        "seq_len": 32,
        "out": folder / "out",
        "on_error": "quarantine",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "samples_per_shard", lambda *_: 100)
        prepare(PrepConfig.model_validate(keys))
    assert len(read_index(folder / "out/train")) > 8
    return folder / "out"


@pytest.fixture
def data(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "data")
    return tmp_path / "data"


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_whole_is_accepted(whole: Path, workers: int) -> None:
    assert verify(whole, workers) == DatasetInfo.load(whole).summary() | {"verified": True}


def test_unknown_files_are_pointed_out(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify(data)
    assert "warning" not in capsys.readouterr().err
    for name in (".dataset.json.7.tmp", "notes.txt", "val/shard.00999.mds"):
        (data / name).touch()
    assert verify(data)["verified"]
    errors = capsys.readouterr().err
    for name in (".dataset.json.7.tmp", "notes.txt", "val/shard.00999.mds"):
        assert f"warning: {data / name} is not part of the dataset" in errors


@pytest.mark.parametrize("place", [0, 5, 500, -1])
def test_a_flipped_byte(data: Path, place: int) -> None:
    flip(data / "train/shard.00004.mds", place)
    with raises_error(
        "shard.corrupt" if place in (0, 5) else "verify.hash", "train/shard.00004.mds"
    ):
        verify(data, workers=2)


FILES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda d: (d / "train/shard.00002.mds").unlink(), ("shard.missing", "shard.00002.mds")),
    (
        lambda d: (d / "train/shard.00002.mds").write_bytes(
            (d / "train/shard.00002.mds").read_bytes()[:-9]
        ),
        ("shard.corrupt", "shard.00002.mds"),
    ),
    (lambda d: (d / "val/index.json").unlink(), ("dataset.incomplete", "val/index.json")),
    (
        lambda d: np.save(d / "token_counts.npy", np.zeros(601)),
        ("verify.token_counts", "token_counts.npy"),
    ),
    (lambda d: (d / "token_counts.npy").unlink(), ("verify.token_counts", "token_counts.npy")),
    (lambda d: (d / "rejects.jsonl").unlink(), ("verify.rejects", "rejects.jsonl", "dataset.json")),
    (lambda d: flip(d / "tokenizer.tiktoken", 5), ("tokenizer.duplicate_id",)),
]


@pytest.mark.parametrize(("damage", "message"), FILES)
def test_files(data: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(data)
    with raises_error(*message):
        verify(data)


def swap_shards(index: Any) -> None:
    index["shards"][3], index["shards"][4] = index["shards"][4], index["shards"][3]


INDEX: list[tuple[Callable[[Any], Any], str]] = [
    (swap_shards, ("verify.order", "shard.00004.mds")),
    (lambda i: i["shards"].pop(), ("dataset.corrupt", "dataset.json")),
    (
        lambda i: i["shards"][1]["raw_data"]["hashes"].update(sha256="0" * 64),
        ("verify.hash", "shard.00001.mds", "sha256"),
    ),
    (lambda i: i["shards"][1].update(column_names=["tokens"]), ("dataset.corrupt",)),
]


@pytest.mark.parametrize(("change", "message"), INDEX)
def test_index(data: Path, change: Callable[[Any], Any], message: str) -> None:
    edit(data / "train/index.json", change)
    with raises_error(*message):
        verify(data)


def more_of_a_subset(info: Any) -> None:
    subsets = info["splits"]["train"]["subsets"]
    subsets["classes"]["ids"] += 1
    subsets["functions"]["ids"] -= 1


def another_document(info: Any) -> None:
    info["documents"] += 1
    info["splits"]["train"]["documents"] += 1
    info["splits"]["train"]["subsets"]["classes"]["documents"] += 1


DESCRIPTION: list[tuple[Callable[[Any], Any], str]] = [
    (more_of_a_subset, ("verify.totals", "dataset.json", "classes")),
    (another_document, ("verify.totals", "dataset.json")),
    (lambda i: i["splits"]["val"].update(bytes_of_text=3), ("verify.totals", "dataset.json")),
    (lambda i: i.update(fingerprint="0" * 64), ("verify.fingerprint", "dataset.json")),
    (lambda i: i.update(rejected=2), ("verify.totals",)),
    (lambda i: i.update(empty=2), ("verify.totals",)),
    (lambda i: i.update(duplicates=2), ("verify.totals",)),
    (lambda i: i["sources"][0].update(documents=1), ("verify.totals",)),
    (lambda i: i["tokenizer"].update(end_of_text=3), ("dataset.corrupt", "end_of_text")),
]


@pytest.mark.parametrize(("change", "message"), DESCRIPTION)
def test_description(data: Path, change: Callable[[Any], Any], message: str) -> None:
    edit(data / "dataset.json", change)
    with raises_error(*message):
        verify(data)


# ---------------------------------------------------------------- rows that contradict


def rewritten(data: Path, change: Callable[[ShardSamples], Any]) -> None:
    """The last validation shard, written again with its hash, so that only its rows are wrong."""
    info, entries = DatasetInfo.load(data), json.loads((data / "val/index.json").read_text())
    place = len(entries["shards"]) - 2
    name = shard_name(place)
    found = read_shard(data / "val" / name, info.seq_len, info.dtype)
    ids = np.append(found.tokens[:, :-1].reshape(-1), found.tokens[-1, -1])
    rows = ShardSamples(
        ids=ids,
        n_valid=found.n_valid,
        first_document=found.first_document,
        subsets=found.subsets.copy(),
        documents=found.documents,
    )
    change(rows)
    entries["shards"][place] = write_shard(data / "val" / name, rows)
    write_index(data / "val", entries["shards"])
    described = build.fingerprint(
        data, info.tokenizer.fingerprint, info.seq_len, info.subsets, info.splits
    )
    edit(data / "dataset.json", lambda d: d.update(fingerprint=described))


def set_id(rows: ShardSamples, value: int) -> None:
    rows.ids[40] = value


ROWS: list[tuple[Callable[[ShardSamples], Any], str]] = [
    (lambda rows: set_id(rows, 601), ("verify.invalid_id",)),
    (lambda rows: set_id(rows, 600), ("verify.documents", "first_document")),
    (lambda rows: rows.first_document.__setitem__(3, 0), ("verify.documents", "first_document")),
    (lambda rows: rows.subsets.__setitem__(0, 9), ("verify.invalid_id",)),
    (lambda rows: rows.n_valid.__setitem__(2, 9), ("verify.order",)),
]


@pytest.mark.parametrize(("change", "message"), ROWS)
def test_rows(data: Path, change: Callable[[ShardSamples], Any], message: str) -> None:
    rewritten(data, change)
    with raises_error(*message):
        verify(data)
