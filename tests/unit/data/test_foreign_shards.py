"""Index and files of MDS shards that another converter wrote: which bytes a row comes from."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
from errors import raises_error
from streaming.base.util import merge_index

from leviathan.config.run import DataConfig
from leviathan.data.dataset import Dataset, open_dataset
from leviathan.data.foreign_mds import ForeignShardReader
from leviathan.data.mds import read_index
from leviathan.data.remote import ShardCache

SEQ_LEN = 16
WIDTH = SEQ_LEN + 1


def row(number: int) -> np.ndarray:
    return ((np.arange(WIDTH) + WIDTH * number) % 600).astype(np.int32)


def write(
    folder: Path,
    numbers: range,
    compression: str | None = None,
    hashes: list[str] | None = None,
    limit: int = 100_000,
) -> None:
    columns = {"tokens": f"ndarray:int32:{WIDTH}"}
    with streaming.MDSWriter(
        out=str(folder), columns=columns, compression=compression, hashes=hashes, size_limit=limit
    ) as writer:
        for number in numbers:
            writer.write({"tokens": row(number)})


def merged(
    folder: Path, compression: str | None, hashes: list[str] | None, parts: tuple[range, ...]
) -> None:
    """Directories of parts joined by streaming's `merge_index`."""
    for number, part in enumerate(parts):
        write(folder / str(number), part, compression, hashes)
    merge_index(str(folder), keep_local=True)


EQUAL = (range(30), range(30, 60), range(60, 90))
UNEQUAL = (range(30), range(30, 50), range(50, 90))


@pytest.fixture
def data(tmp_path: Path, tiny_tokenizer: Path) -> Callable[..., Dataset]:
    def build(**changes: Any) -> Dataset:
        form = {
            "kind": "mds_tokens",
            "tokenizer": str(tiny_tokenizer),
            "cache": str(tmp_path / "cache"),
        }
        config = DataConfig.model_validate({"path": tmp_path / "set", "format": form | changes})
        return open_dataset(config, SEQ_LEN)

    return build


def tokens(dataset: Dataset) -> list[list[int]]:
    rows = dataset.rows("train")
    return [rows[number].tokens.tolist() for number in range(len(rows))]


def expected(count: int, first: int = 0) -> list[list[int]]:
    return [row(number).tolist() for number in range(first, first + count)]


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / "index.json").read_bytes())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def unpacked(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.mds"))


# ---------------------------------------------------------------- joined folders


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7", "gz", "bz2:9"])
@pytest.mark.parametrize("hashes", [None, ["sha1", "xxh64"]])
def test_joined_folders_keep_their_rows(
    tmp_path: Path, data: Any, compression: str | None, hashes: list[str] | None
) -> None:
    merged(tmp_path / "set", compression, hashes, EQUAL)
    assert tokens(data()) == expected(90)
    assert tokens(data()) == expected(90)  # from the cache
    assert len(unpacked(tmp_path)) == (3 if compression else 0)


def test_joined_folders_of_different_sizes(tmp_path: Path, data: Any) -> None:
    merged(tmp_path / "set", "zstd", None, UNEQUAL)
    assert tokens(data()) == expected(90)


def test_the_shared_joined_folders(tmp_path: Path, shared: Path, tiny_tokenizer: Path) -> None:
    folder = shared / "data/broken/formats/merged_mds_zstd"
    if not folder.is_dir():
        pytest.skip("the shared data has no such folder")
    form = {
        "kind": "mds_tokens",
        "tokenizer": str(tiny_tokenizer),
        "vocab_size": 8000,
        "cache": str(tmp_path),
    }
    config = DataConfig.model_validate({"path": folder, "format": form})
    found = tokens(open_dataset(config, SEQ_LEN))
    assert found == [((np.arange(17) + 17 * i) % 8000).tolist() for i in range(90)]


def test_one_shard_listed_twice_is_refused(tmp_path: Path, data: Any) -> None:
    """An index joined without the directories of its shards."""
    merged(tmp_path / "set", None, None, EQUAL)
    shutil.copy(tmp_path / "set/0/shard.00000.mds", tmp_path / "set/shard.00000.mds")

    def flatten(index: dict[str, Any]) -> None:
        for shard in index["shards"]:
            shard["raw_data"]["basename"] = "shard.00000.mds"

    edit(tmp_path / "set", flatten)
    with raises_error("dataset.corrupt", "index.json", "shard.00000.mds"):
        data()


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("hashes", [None, ["sha1"]])
def test_a_data_set_written_again_under_its_path(
    tmp_path: Path, data: Any, hashes: list[str] | None
) -> None:
    write(tmp_path / "set", range(30), "gz", hashes)
    assert tokens(data()) == expected(30)
    before = (tmp_path / "set/index.json").read_bytes()
    shutil.rmtree(tmp_path / "set")
    write(tmp_path / "set", range(40, 70), "gz", hashes)
    if hashes is None:  # only the time differs: the same index and sizes
        packed = tmp_path / "set/shard.00000.mds.gz"
        edit(
            tmp_path / "set",
            lambda index: index["shards"][0]["zip_data"].update(bytes=packed.stat().st_size),
        )
        other = json.loads(before)
        other["shards"][0]["zip_data"]["bytes"] = packed.stat().st_size
        assert json.loads((tmp_path / "set/index.json").read_bytes()) == other
        os.utime(packed, ns=(1, 1))
    assert tokens(data()) == expected(30, 40)


@pytest.mark.parametrize("damage", ["shorter", "changed"])
def test_a_damaged_file_in_the_cache_is_unpacked_again(
    tmp_path: Path, data: Any, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    merged(tmp_path / "set", "zstd", ["xxh3_64"], EQUAL)
    assert tokens(data()) == expected(90)
    file = unpacked(tmp_path)[1]
    content = file.read_bytes()
    file.write_bytes(content[:-9] if damage == "shorter" else content[:-9] + bytes(9))
    assert tokens(data()) == expected(90)
    assert f"warning: {file}: it" in capsys.readouterr().err
    assert file.read_bytes() == content


def test_the_cache_may_be_emptied_while_it_is_in_use(tmp_path: Path, data: Any) -> None:
    merged(tmp_path / "set", "zstd", None, EQUAL)
    dataset = data()
    rows = dataset.rows("train")
    assert rows[0].tokens.tolist() == row(0).tolist()
    shutil.rmtree(tmp_path / "cache")
    assert tokens(dataset) == expected(90)


# ---------------------------------------------------------------- hashes


def damage_packed(path: Path, hash: str) -> None:
    """Replaces a compressed shard by a valid one of the indexed size with other samples."""
    other = path.parent.parent / "other"
    write(other, range(100, 130), "gz", [hash])
    path.write_bytes((other / "shard.00000.mds.gz").read_bytes())
    size = path.stat().st_size
    edit(path.parent, lambda index: index["shards"][0]["zip_data"].update(bytes=size))


@pytest.mark.parametrize("of", ["raw_data", "zip_data"])
@pytest.mark.parametrize("name", ["sha1", "md5", "blake2b", "sha3_256", "xxh64", "xxh128"])
def test_hashes_are_compared_when_unpacking(tmp_path: Path, data: Any, name: str, of: str) -> None:
    write(tmp_path / "set", range(30), "gz", [name])
    damage_packed(tmp_path / "set/shard.00000.mds.gz", name)
    other = "raw_data" if of == "zip_data" else "zip_data"
    edit(tmp_path / "set", lambda index: index["shards"][0][other].update(hashes={}))
    with raises_error("shard.corrupt", "shard.00000.mds.gz", name):
        data()
    assert not unpacked(tmp_path)


def test_hashes_of_plain_shards_are_compared_on_request(tmp_path: Path, data: Any) -> None:
    merged(tmp_path / "set", None, ["sha256"], EQUAL)
    rows = data().rows("train")
    assert isinstance(rows, ForeignShardReader)
    assert rows.verify() == 0
    shard = tmp_path / "set/1/shard.00000.mds"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with raises_error("shard.corrupt", "1/shard.00000.mds", "sha256"):
        rows.verify()
    edit(tmp_path / "set", lambda index: index["shards"][1]["raw_data"].update(hashes={}))
    rows = data().rows("train")
    assert isinstance(rows, ForeignShardReader)
    assert rows.verify() == 1


@pytest.mark.parametrize("compression", ["zstd", "gz", "bz2"])
def test_packed_shards_that_are_cut_off(tmp_path: Path, data: Any, compression: str) -> None:
    write(tmp_path / "set", range(30), compression)
    packed = tmp_path / f"set/shard.00000.mds.{compression}"
    packed.write_bytes(packed.read_bytes()[:-20])
    with raises_error("shard.corrupt", f"mds.{compression}"):
        data()
    size = packed.stat().st_size
    edit(tmp_path / "set", lambda index: index["shards"][0]["zip_data"].update(bytes=size))
    with raises_error("shard.corrupt", f"mds.{compression}"):
        data()
    assert not unpacked(tmp_path)


def test_every_shard_is_looked_for_at_once(tmp_path: Path, data: Any) -> None:
    merged(tmp_path / "set", "zstd", None, EQUAL)
    (tmp_path / "set/2/shard.00000.mds.zstd").unlink()
    with raises_error("shard.missing", "2/shard.00000.mds"):
        data()


@pytest.mark.parametrize("below", ["train", "val", "validation"])
def test_an_index_above_those_of_the_splits_is_refused(
    tmp_path: Path, data: Any, below: str
) -> None:
    """A merge over all directories lists the validation samples with those for training."""
    write(tmp_path / "set" / below, range(5))
    write(tmp_path / "set/other", range(5, 9))
    merge_index(str(tmp_path / "set"), keep_local=True)
    with raises_error("dataset.ambiguous", "index.json", f"{below}/index.json"):
        data()


def test_a_hash_of_the_compressed_file_alone_does_not_verify_the_unpacked_one(
    tmp_path: Path, data: Any
) -> None:
    write(tmp_path / "set", range(5), "gz", ["sha256"])
    edit(tmp_path / "set", lambda index: index["shards"][0]["raw_data"].update(hashes={}))
    rows = data().rows("train")
    assert isinstance(rows, ForeignShardReader)
    assert rows.verify() == 1
    (packed,) = (tmp_path / "set").glob("*.gz")
    content = bytearray(packed.read_bytes())
    content[4] ^= 1  # the time in gzip's header: the unpacked file stays the same
    packed.write_bytes(content)
    with raises_error("shard.corrupt", "mds.gz", "sha256"):
        rows.verify()


# ---------------------------------------------------------------- the index


@pytest.mark.parametrize("name", ["./0/shard.00000.mds", "0//shard.00000.mds", "0/"])
def test_one_file_under_two_spellings_is_refused(tmp_path: Path, data: Any, name: str) -> None:
    merged(tmp_path / "set", None, None, EQUAL)
    edit(tmp_path / "set", lambda index: index["shards"][1]["raw_data"].update(basename=name))
    with raises_error("dataset.corrupt"):
        data()


def test_one_compressed_file_for_two_shards_is_refused(tmp_path: Path, data: Any) -> None:
    merged(tmp_path / "set", "gz", None, EQUAL)
    first = "0/shard.00000.mds.gz"
    edit(tmp_path / "set", lambda index: index["shards"][1]["zip_data"].update(basename=first))
    with raises_error("dataset.corrupt", first, "2"):
        data()


def shard_key(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda index: index["shards"][1].update({key: value})


def file_key(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda index: index["shards"][1]["raw_data"].update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=3), ("dataset.corrupt", "index.json")),
        (shard_key("version", 1), ("dataset.corrupt", "shards.1.version")),
        (shard_key("format", "json"), ("dataset.corrupt", "shards.1.format", "json", "mds")),
        (shard_key("compression", "lz77"), ("dataset.corrupt", "shards.1.compression", "lz77")),
        (shard_key("encryption", "aes"), ("dataset.corrupt", "shards.1.encryption")),
        (file_key("offset", 9), ("dataset.corrupt", "shards.1.raw_data.offset")),
        (
            file_key("hashes", {"crc99": "0"}),
            ("dataset.corrupt", "shards.1.raw_data.hashes", "crc99"),
        ),
        (file_key("hashes", {"shake_128": "0"}), ("dataset.corrupt", "shake_128", "xxh64")),
        (file_key("basename", "/etc/passwd"), ("dataset.corrupt", "/etc/passwd")),
        (file_key("basename", "../0/shard.00000.mds"), ("dataset.corrupt", "../0/shard.00000.mds")),
        (file_key("basename", "1/../../x.mds"), ("dataset.corrupt", "1/../../x.mds")),
        (file_key("basename", ""), ("dataset.corrupt",)),
        (shard_key("column_sizes", []), ("dataset.corrupt", "column_sizes")),
        (shard_key("samples", -1), ("dataset.corrupt", "index.json", "shards.1.samples")),
    ],
)
def test_what_the_index_must_not_say(
    tmp_path: Path, data: Any, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    merged(tmp_path / "set", None, ["sha1"], EQUAL)
    edit(tmp_path / "set", change)
    with raises_error(*message):
        data()


def test_a_packing_without_a_reader_is_named(tmp_path: Path, data: Any) -> None:
    write(tmp_path / "set", range(30), "snappy")
    with raises_error("shard.unsupported_compression", "mds.snappy", "bz2"):
        data()


def test_columns_that_hold_no_integers_are_refused(tmp_path: Path, data: Any) -> None:
    with streaming.MDSWriter(
        out=str(tmp_path / "set"), columns={"tokens": f"ndarray:float32:{WIDTH}"}
    ) as writer:
        writer.write({"tokens": row(0).astype(np.float32)})
    with raises_error("dataset.wrong_column_type", "float32", "tokens"):
        data()


def test_the_index_of_our_own_data_sets_stays_in_its_folder(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    """A remote dataset must not write outside of its cache."""
    origin = tmp_path / "origin"
    shutil.copytree(tiny_dataset, origin)
    outside = "../../outside.mds"
    shutil.copy(origin / "train/shard.00000.mds", tmp_path / "origin/train" / outside)
    edit(origin / "train", lambda i: i["shards"][0]["raw_data"].update(basename=outside))
    cache = ShardCache(str(origin), tmp_path / "caches/one", None)
    info = cache.open()
    with raises_error("dataset.corrupt", "../../outside.mds"):
        cache.rows(info, "train")
    with raises_error("dataset.corrupt", "../../outside.mds"):
        read_index(origin / "train")
    assert not (tmp_path / "caches/outside.mds").exists()


def test_shards_in_folders_of_a_data_set_that_lies_elsewhere(
    tiny_dataset: Path, tmp_path: Path
) -> None:
    origin = tmp_path / "origin"
    shutil.copytree(tiny_dataset, origin)
    (origin / "train/0").mkdir()
    (origin / "train/shard.00000.mds").rename(origin / "train/0/shard.00000.mds")
    name = "0/shard.00000.mds"
    edit(origin / "train", lambda i: i["shards"][0]["raw_data"].update(basename=name))
    cache = ShardCache(str(origin), tmp_path / "cache", None)
    rows = cache.rows(cache.open(), "train")
    assert rows[0].n_valid > 0
    assert (tmp_path / "cache/train" / name).is_file()
