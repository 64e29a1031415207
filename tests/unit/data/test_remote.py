"""Remote datasets, served by a directory and by a local web server."""

import gc
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import numpy as np
import pytest
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.config.run import DataConfig
from leviathan.data import remote
from leviathan.data.dataset import open_dataset
from leviathan.data.format import DatasetInfo
from leviathan.data.loader import TrainLoader, eval_batches
from leviathan.data.mds import ShardReader, read_index
from leviathan.data.prepare import packing as pack
from leviathan.data.prepare import prepare

WINDOW = 40


@pytest.fixture(scope="module")
def far(tiny_corpus: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of many shards."""
    out = tmp_path_factory.mktemp("far") / "set"
    keys = {
        "source": {"paths": [str(tiny_corpus)]},
        "validation": {"fraction": 0.1},
        "tokenizer": str(tiny_tokenizer),
        "seq_len": 32,
        "out": out,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "samples_per_shard", lambda *_: 100)
        prepare(PrepConfig.model_validate(keys))
    assert len(read_index(out / "train")) > 8
    return out


@pytest.fixture
def web(far: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(far)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def data(url: object, folder: Path, **more: object) -> DataConfig:
    keys = {"path": str(folder), "remote": str(url), "shuffle_window": WINDOW}
    return DataConfig.model_validate(keys | more)


def tokens(config: DataConfig, steps: int = 40) -> list[np.ndarray]:
    stream = TrainLoader(open_dataset(config), 1, WINDOW, 8, 4)
    return [b.input_ids.numpy() for step in range(steps) for b in stream.microbatches(step, 0, 1)]


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*/*.mds"))


def test_rows_are_those_of_the_set_itself(far: Path, web: str, tmp_path: Path) -> None:
    expected = tokens(DataConfig(path=far, shuffle_window=WINDOW))
    for number, url in enumerate((far, f"file://{far}", web)):
        config = data(url, tmp_path / str(number))
        found = tokens(config)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), url
        local = eval_batches(far, "val", 4)
        for one, other in zip(eval_batches(open_dataset(config), "val", 4), local, strict=True):
            assert one.rows == other.rows
            assert one.targets.equal(other.targets)


def test_the_folder_stays_within_its_limit(far: Path, tmp_path: Path) -> None:
    shards = read_index(far / "train")
    largest = max(shard.raw_data.bytes for shard in shards)
    whole = sum(shard.raw_data.bytes for shard in shards)
    config = data(far, tmp_path / "cache", cache_limit=5 * largest, shuffle_window=WINDOW)
    dataset = open_dataset(config)
    rows = dataset.rows("train")
    most, seen = 0, []
    for number in range(len(rows)):
        seen.append(rows[number].tokens)
        most = max(most, held(tmp_path / "cache"))
    assert np.array_equal(
        np.stack(seen), np.stack([row.tokens for row in ShardReader(far / "train")])
    )
    assert most <= 5 * largest < whole
    assert rows[0].tokens.tolist() == seen[0].tolist()  # removed since, and fetched again


def test_what_is_open_elsewhere_is_not_removed(far: Path, tmp_path: Path) -> None:
    cache = remote.ShardCache(str(far), tmp_path / "cache", 1)
    info = cache.open()
    reader, other = cache.rows(info, "train"), cache.rows(info, "train")
    first = reader[0]
    other[len(other) - 1]
    assert (tmp_path / "cache/train" / reader.shards[0].raw_data.basename).exists()
    assert np.array_equal(reader[0].tokens, first.tokens)
    del reader
    gc.collect()
    other[int(other.shard_rows[0])]
    assert not (tmp_path / "cache/train" / other.shards[0].raw_data.basename).exists()


def test_a_limit_below_one_window_is_refused(far: Path, tmp_path: Path) -> None:
    with raises_error("cache.limit_too_small", "data.cache_limit", "1.0"):
        open_dataset(data(far, tmp_path / "cache", cache_limit=1000))


def test_contradicting_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_limit requires remote"):
        DataConfig.model_validate({"path": "x", "cache_limit": "1GB"})
    with pytest.raises(ValueError, match="cache_limit"):
        data("s3://b", tmp_path, cache_limit="much")
    with pytest.raises(ValueError, match="remote and format exclude each other"):
        data("s3://b", tmp_path, format={"kind": "mds_tokens", "tokenizer": "gpt2"})


def test_a_folder_of_the_users_is_left_alone(far: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(far, own)
    before = sorted(own.rglob("*"))
    with raises_error("cache.not_empty"):
        open_dataset(data(far, own))
    assert sorted(own.rglob("*")) == before


def test_another_set_under_the_same_folder_is_refused(
    far: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    open_dataset(data(far, tmp_path / "cache"))
    with raises_error("cache.other_dataset"):
        open_dataset(data(tiny_dataset, tmp_path / "cache"))


def test_nothing_there(tmp_path: Path) -> None:
    for url in (tmp_path / "nowhere", "http://127.0.0.1:9/set"):
        with raises_error("dataset.not_found", "dataset.json"):
            open_dataset(data(url, tmp_path / "cache"))
    with raises_error("url.unknown_protocol"):
        open_dataset(data("nosuch://bucket/set", tmp_path / "cache"))


def test_without_the_network_what_is_here_serves(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    origin, cache = tmp_path / "origin", tmp_path / "cache"
    shutil.copytree(far, origin)
    epoch = DatasetInfo.load(far).split("train").rows // 8 + 1
    expected = tokens(data(origin, cache), epoch)
    origin.rename(tmp_path / "gone")
    assert all(
        np.array_equal(a, b) for a, b in zip(tokens(data(origin, cache), 9), expected, strict=False)
    )
    assert "cannot be reached" in capsys.readouterr().err
    lost = next((cache / "train").glob("*.mds"))
    lost.unlink()
    monkeypatch.setattr(remote, "_ATTEMPTS", 2)
    with raises_error("shard.not_fetched", lost.name):
        tokens(data(origin, cache), epoch)


def test_bytes_that_are_not_the_index_s_are_never_kept(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_ATTEMPTS", 2)
    origin = tmp_path / "origin"
    shutil.copytree(far, origin)
    for shard in (origin / "train").glob("*.mds"):
        content = bytearray(shard.read_bytes())
        content[-5] ^= 1
        shard.write_bytes(content)
    with raises_error("shard.not_fetched"):
        tokens(data(origin, tmp_path / "cache"), 1)
    assert not list((tmp_path / "cache/train").glob("*.mds"))


def read_on(config: DataConfig, limit: int, seed: int) -> None:
    """Reads the complete dataset in random order several times, as one of many ranks."""
    cache = remote.ShardCache(str(config.remote), config.path, limit)
    rows = cache.rows(cache.open(), "train")
    for number in np.random.default_rng(seed).integers(0, len(rows), 150).tolist():
        rows[number]


def test_readers_that_are_killed_leave_nothing_in_the_way(far: Path, tmp_path: Path) -> None:
    """Three readers in one directory with space for six shards; one is killed."""
    config = data(far, tmp_path / "cache")
    largest = max(shard.raw_data.bytes for shard in read_index(far / "train"))
    context = multiprocessing.get_context("spawn")
    readers = [context.Process(target=read_on, args=(config, 6 * largest, s)) for s in range(3)]
    for reader in readers:
        reader.start()
    deadline = monotonic() + 200
    while not list((tmp_path / "cache").glob("train/*.mds")) and monotonic() < deadline:
        sleep(0.005)
    assert readers[0].pid is not None
    os.kill(readers[0].pid, signal.SIGKILL)
    for reader in readers:
        reader.join(200)
    assert [reader.exitcode for reader in readers] == [-9, 0, 0]
    assert tokens(config, 5)
