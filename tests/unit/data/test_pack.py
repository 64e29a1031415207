"""Many small shards: the same rows and bytes for any number of workers and any interruption."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
from errors import raises_error
from prep_cases import hashes, shards, start_preparation, stream_of, wait_for_orphans

from leviathan.config.data import PrepConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import ShardReader
from leviathan.data.prepare import packing as duplicates
from leviathan.data.prepare import packing as pack
from leviathan.data.prepare import packing as stream_index
from leviathan.data.prepare import prepare, verify
from leviathan.data.prepare.split import split_by_subset
from leviathan.data.tokenizer import load_tokenizer

Config = Callable[..., PrepConfig]
ROWS = 40


@pytest.fixture
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 40 rows and tables read in slices of 7 documents."""
    monkeypatch.setattr(pack, "samples_per_shard", lambda *_: ROWS)
    monkeypatch.setattr(stream_index, "SLICE_DOCUMENTS", 7)
    monkeypatch.setattr(duplicates, "SLICE_DOCUMENTS", 7)


def documents_of(data: Path, split: str = "train") -> list[str]:
    """The texts of a split, in order."""
    tokenizer = load_tokenizer(data)
    return tokenizer.decode(stream_of(data / split)).split("<|endoftext|>")[:-1]


# ---------------------------------------------------------------- shards


@pytest.mark.usefixtures("many_shards")
def test_many_shards_hold_the_stream_of_one(config: Config, tmp_path: Path) -> None:
    wanted = config(validation={"fraction": 0.3})
    prepare(wanted)
    assert verify(wanted.out)["verified"]
    rows = ShardReader(wanted.out / "train")
    assert len(rows.shards) > 10
    assert set(rows.shard_rows[:-1]) == {ROWS}
    library = streaming.StreamingDataset(
        local=str(wanted.out / "train"), shuffle=False, batch_size=1
    )
    pack.samples_per_shard = lambda *_: 10**6  # undone by the fixture
    one = config(validation={"fraction": 0.3}, out=tmp_path / "one")
    prepare(one)
    single = ShardReader(one.out / "train")
    assert len(single.shards) == 1
    for number, row in enumerate(rows[n] for n in range(len(rows))):
        other, sample = single[number], library[number]
        assert row.tokens.tolist() == other.tokens.tolist() == sample["tokens"].tolist()
        assert row.subsets.tolist() == other.subsets.tolist() == sample["subsets"].tolist()
        assert (row.first_document, row.n_valid) == (other.first_document, other.n_valid)
    assert DatasetInfo.load(one.out).splits == DatasetInfo.load(wanted.out).splits
    counts = [np.load(data.out / "token_counts.npy") for data in (wanted, one)]
    assert np.array_equal(*counts)


@pytest.mark.usefixtures("many_shards")
def test_bytes_for_one_two_and_four_workers(config: Config, tmp_path: Path) -> None:
    found = []
    for workers in (1, 2, 4):
        out = tmp_path / str(workers)
        prepare(config(workers=workers, out=out, validation={"fraction": 0.1}))
        found.append(hashes(out))
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("many_shards")
def test_finished_shards_are_not_written_again(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = config(out=tmp_path / "undisturbed", deduplicate=True)
    prepare(undisturbed)
    written: list[str] = []

    def dies_at_the_sixth(path: Path, rows: Any) -> Any:
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append(path.name)
        return write(path, rows)

    write = pack.write_shard
    monkeypatch.setattr(pack, "write_shard", dies_at_the_sixth)
    wanted = config(deduplicate=True)
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted)
    inside = wanted.out / ".prep/pack/train"
    corrupt = inside / written[2]
    corrupt.write_bytes(corrupt.read_bytes()[:-5])  # a disk that lost its end
    again: list[str] = []

    def noted(path: Path, rows: Any) -> Any:
        again.append(path.name)
        return write(path, rows)

    monkeypatch.setattr(pack, "write_shard", noted)
    prepare(wanted)
    assert set(again) & set(written) == {corrupt.name}
    assert hashes(wanted.out) == hashes(undisturbed.out)


@pytest.mark.usefixtures("many_shards")
def test_shards_of_other_parts_are_not_kept(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = shards(tmp_path / "in", [["one two three " * 300] * 3, ["four " * 900]])
    write = pack.write_shard
    monkeypatch.setattr(pack, "write_index", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    wanted = config(source={"paths": paths})
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted)
    monkeypatch.undo()
    assert list((wanted.out / ".prep/pack/train").glob("*.mds"))
    shards(tmp_path / "in", [["one two three " * 300] * 3, ["five " * 900]])
    prepare(wanted)
    assert documents_of(wanted.out)[-1] == "five " * 900
    assert verify(wanted.out)["verified"]
    assert write is pack.write_shard


# ---------------------------------------------------------------- kill -9


@pytest.fixture(scope="module")
def corpus_to_kill(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("kill")
    texts = [f"shard {n}: " + " ".join(map(str, range(n, n + 4_000))) for n in range(6)]
    return shards(folder, [[text] * 5 for text in texts])


def kill_and_continue(config: Config, corpus: list[str], tmp_path: Path, moments: int) -> None:
    keys = {"source": {"paths": corpus}, "validation": {"fraction": 0.2}, "deduplicate": False}
    undisturbed = config(**keys, out=tmp_path / "undisturbed", workers=2)
    process = start_preparation(undisturbed, ROWS)
    begun = None
    while process.poll() is None:
        if begun is None and (undisturbed.out / ".prep/config.json").exists():
            begun = time.monotonic()
    assert begun is not None
    lasts = time.monotonic() - begun
    expected = hashes(undisturbed.out)
    random = np.random.default_rng(moments)
    reached = set()
    for moment in range(moments):
        wanted = config(**keys, out=tmp_path / f"killed{moment}", workers=1 + moment % 2)
        process = start_preparation(wanted, ROWS)
        while not (wanted.out / ".prep/config.json").exists():
            assert process.poll() is None
        # In turns early and late, so that tokenizing and packing are both hit.
        share = random.uniform(0, 0.5) + 0.5 * (moment % 2)
        until = time.monotonic() + share * lasts
        while time.monotonic() < until and process.poll() is None:
            pass
        process.kill()
        process.wait()
        wait_for_orphans(process.pid)
        reached |= {path.name for path in (wanted.out / ".prep").glob("*")}
        process = start_preparation(wanted, ROWS)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert hashes(wanted.out) == expected
    assert {"parts"} <= reached


def test_killed_at_two_moments(config: Config, corpus_to_kill: list[str], tmp_path: Path) -> None:
    kill_and_continue(config, corpus_to_kill, tmp_path, 2)


@pytest.mark.heavy
def test_killed_at_twelve_moments(
    config: Config, corpus_to_kill: list[str], tmp_path: Path
) -> None:
    kill_and_continue(config, corpus_to_kill, tmp_path, 12)


# ---------------------------------------------------------------- mixing


@pytest.fixture
def two_subsets(tmp_path: Path) -> list[str]:
    paths = shards(tmp_path / "a", [[f"a {n} " + "x" * (n % 50) for n in range(300)]], "A")
    return paths + shards(tmp_path / "b", [[f"b {n} " + "y" * 30 for n in range(200)]], "B")


@pytest.mark.usefixtures("many_shards")
def test_mixing_takes_whole_copies_and_a_share_by_hash(
    config: Config, two_subsets: list[str], tmp_path: Path
) -> None:
    source = {"source": {"paths": two_subsets}, "validation": {"fraction": 0.1}}
    plain = config(**source, out=tmp_path / "plain")
    prepare(plain)
    once = documents_of(plain.out)
    wanted = config(**source, mixing={"A": 2.5, "B": 0.25})
    result = prepare(wanted)
    found = documents_of(wanted.out)
    times = {text: found.count(text) for text in once}
    assert set(found) <= set(once)
    assert {times[text] for text in once if text[0] == "a"} == {2, 3}
    assert {times[text] for text in once if text[0] == "b"} == {0, 1}
    thrice = sum(times[text] == 3 for text in once if text[0] == "a")
    assert 0.4 < thrice / sum(text[0] == "a" for text in once) < 0.6
    # Each pass is the corpus in order, without the documents that it omits.
    position = [once.index(text) for text in found]
    passes = np.split(position, np.flatnonzero(np.diff(position) <= 0) + 1)
    assert len(passes) == 3
    assert documents_of(wanted.out, "val") == documents_of(plain.out, "val")
    train = result["splits"]["train"]
    assert sum(size["ids"] for size in train["subsets"].values()) == train["ids"]
    assert train["subsets"]["A"]["documents"] == sum(n for t, n in times.items() if t[0] == "a")
    assert verify(wanted.out)["verified"]


def test_mixing_leaves_out_and_names_the_nearest(
    config: Config, two_subsets: list[str], tmp_path: Path
) -> None:
    source = {"source": {"paths": two_subsets}}
    with raises_error("prep.unknown_subset", "a", "A"):
        prepare(config(**source, mixing={"a": 0}))
    with raises_error("prep.unknown_subset", "Pile-CC"):
        prepare(config(**source, mixing={"Pile-CC": 2}))
    # The slip cost no tokenizing.
    assert (tmp_path / "out/.prep/parts/00001").is_dir()
    wanted = config(**source, mixing={"A": 0})
    assert prepare(wanted)["splits"]["train"]["documents"] == 200
    assert all(text.startswith("b ") for text in documents_of(wanted.out))
    with raises_error("prep.other_config"):
        prepare(config(**source))
    with raises_error("prep.nothing_to_train_on"):
        prepare(config(**source, mixing={"A": 0, "B": 0}, out=tmp_path / "none"))


# ---------------------------------------------------------------- duplicates, subsets


@pytest.mark.usefixtures("many_shards")
def test_duplicates_do_not_depend_on_the_buckets(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    texts = [[f"text {n}" for n in random.integers(0, 60, 100)] for _ in range(3)]
    keys = {
        "source": {"paths": shards(tmp_path / "in", texts[:2])},
        "validation": {"paths": shards(tmp_path / "val", texts[2:])},
        "deduplicate": True,
    }
    prepare(config(**keys, out=tmp_path / "one"))
    monkeypatch.setattr(duplicates, "_BUCKET_DOCUMENTS", 10)
    wanted = config(**keys)
    result = prepare(wanted)
    assert hashes(wanted.out) == hashes(tmp_path / "one")
    held_out = list(dict.fromkeys(texts[2]))
    assert documents_of(wanted.out, "val") == held_out
    expected = [text for text in dict.fromkeys(texts[0] + texts[1]) if text not in held_out]
    assert documents_of(wanted.out) == expected
    assert result["duplicates"] == 300 - len(held_out) - len(expected)


@pytest.mark.usefixtures("many_shards")
def test_split_by_subset_is_a_preparation_of_each(
    config: Config, two_subsets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"validation": {"fraction": 0.1}}
    whole = config(source={"paths": two_subsets[::-1]}, **keys)
    prepare(whole)
    out = tmp_path / "subsets"
    result = split_by_subset(whole.out, out)
    assert list(result) == ["A", "B"]
    for name, paths in (("a", two_subsets[:1]), ("b", two_subsets[1:])):
        alone = config(source={"paths": paths}, **keys, out=tmp_path / f"alone-{name}")
        prepare(alone)
        expected, found = hashes(alone.out), hashes(out / name)
        expected.pop("dataset.json")
        found.pop("dataset.json")
        assert found == expected
        assert verify(out / name)["subsets"] == [name.upper()]
    assert sorted(path.name for path in out.iterdir()) == ["a", "b"]
    before = hashes(out)
    shutil.rmtree(out / "b")
    assert split_by_subset(whole.out, out, workers=2) == result
    assert hashes(out) == before
    assert "subsets/a is complete" in capsys.readouterr().err
    prepare(whole.model_copy(update={"out": tmp_path / "x", "seq_len": 16}))
    with raises_error("prep.other_config"):
        split_by_subset(tmp_path / "x", out)
