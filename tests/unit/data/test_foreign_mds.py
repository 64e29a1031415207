"""Datasets that a peer's converter wrote, with the library's own writer."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
import torch
from errors import raises_error

from leviathan.config.run import DataConfig
from leviathan.data.dataset import Dataset, open_dataset, save_tokenizer
from leviathan.data.loader import IGNORE, TrainLoader, eval_batches
from leviathan.data.tokenizer import load_tokenizer

SEQ_LEN = 16


def write(
    folder: Path, rows: Any, encoding: str, column: str = "tokens", compression: str | None = None
) -> None:
    """Samples as written by another converter, with additional columns."""
    columns = {"a_note": "str", column: encoding, "z_number": "int"}
    with streaming.MDSWriter(
        out=str(folder), columns=columns, compression=compression, size_limit=3000
    ) as writer:
        for number, row in enumerate(rows):
            value = row.tobytes() if encoding == "bytes" else row
            writer.write({"a_note": "x" * (number % 7), column: value, "z_number": number})


def ids(rows: int, length: int, dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 601, (rows, length)).astype(dtype)


@pytest.fixture
def data(tmp_path: Path, tiny_tokenizer: Path) -> Iterator[Any]:
    def build(**changes: Any) -> Dataset:
        form = {"kind": "mds_tokens", "tokenizer": str(tiny_tokenizer)} | changes
        config = DataConfig.model_validate({"path": tmp_path / "set", "format": form})
        return open_dataset(config, SEQ_LEN)

    return build


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [
        ("bytes", "int64"),
        ("bytes", "uint16"),
        ("ndarray:int32", "int32"),
        (f"ndarray:uint32:{SEQ_LEN + 1}", "uint32"),
        ("ndarray", "int64"),
    ],
)
def test_every_row_is_trained_on_as_it_was_written(
    tmp_path: Path, data: Any, encoding: str, dtype: str
) -> None:
    expected = ids(100, SEQ_LEN + 1, dtype)
    write(tmp_path / "set", expected, encoding)
    dataset = data(dtype=dtype if encoding == "bytes" else None)
    assert (dataset.info.vocab_size, dataset.info.splits["train"].tokens) == (601, 100 * SEQ_LEN)
    stream = TrainLoader(dataset, 1, 50, 20, 10)
    seen = {}
    for step in range(5):
        for batch in stream.microbatches(step, 0, 1):
            for row, inputs, targets in zip(
                batch.rows, batch.input_ids, batch.targets, strict=True
            ):
                seen[row] = [*inputs.tolist(), int(targets[-1])]
    assert sorted(seen) == list(range(100))
    assert all(seen[row] == expected[row].tolist() for row in seen)


def test_rows_of_seq_len_ids_lose_their_last_target(tmp_path: Path, data: Any) -> None:
    expected = ids(40, SEQ_LEN, "int64")
    write(tmp_path / "set/train", expected, "bytes", column="input_ids")
    write(tmp_path / "set/validation", expected[:10], "bytes", column="input_ids")
    dataset = data(dtype="int64", column="input_ids")
    assert dataset.info.splits["train"].padded == 40
    for batch in TrainLoader(dataset, 1, 40, 40, 40).microbatches(0, 0, 1):
        assert (batch.targets[:, -1] == IGNORE).all()
        assert torch.equal(batch.targets[:, :-1], batch.input_ids[:, 1:])
        assert batch.n_targets == 40 * (SEQ_LEN - 1)
    (batch,) = eval_batches(dataset, "val", 10)
    assert torch.equal(batch.input_ids, torch.from_numpy(expected[:10]))


def test_other_lengths_are_refused(tmp_path: Path, data: Any) -> None:
    write(tmp_path / "set", ids(5, SEQ_LEN + 2, "int64"), "bytes")
    with raises_error("dataset.wrong_length", "model.seq_len=18", "17"):
        data(dtype="int64")
    with raises_error("dataset.wrong_length", "36", "data.format.dtype"):
        data(dtype="int32")


def test_a_row_of_another_length_is_named(tmp_path: Path, data: Any) -> None:
    rows = [*ids(7, SEQ_LEN, "int64"), ids(1, 3, "int64")[0]]
    write(tmp_path / "set", rows, "bytes")
    with raises_error("dataset.wrong_length"):
        TrainLoader(data(dtype="int64"), 1, 8, 8, 8).microbatches(0, 0, 1)


@pytest.mark.parametrize("wrong", [601, -1, 70_000])
def test_ids_beyond_the_vocabulary_name_their_row(tmp_path: Path, data: Any, wrong: int) -> None:
    rows = ids(30, SEQ_LEN + 1, "int32")
    rows[17, 3] = wrong
    write(tmp_path / "set", rows, "bytes")
    with raises_error("dataset.invalid_id", "17", wrong, "601"):
        TrainLoader(data(dtype="int32"), 1, 30, 30, 30).microbatches(0, 0, 1)


def test_packed_shards(tmp_path: Path, data: Any) -> None:
    expected = ids(100, SEQ_LEN + 1, "int64")
    write(tmp_path / "set", expected, "bytes", compression="zstd:3")
    with raises_error("dataset.no_cache", "shard.00000.mds.zstd", "data.format.cache"):
        data(dtype="int64")
    dataset = data(dtype="int64", cache=str(tmp_path / "cache"))
    rows = dataset.rows("train")
    assert [rows[n].tokens.tolist() for n in range(100)] == expected.tolist()
    assert len(list((tmp_path / "cache").rglob("*.mds"))) > 1
    packed = tmp_path / "set/shard.00001.mds.zstd"
    packed.write_bytes(packed.read_bytes()[:50])
    with raises_error("shard.corrupt", "shard.00001.mds.zstd"):
        _ = data(dtype="int64", cache=str(tmp_path / "other")).rows("train")[20]


def test_a_tokenizer_that_nothing_describes(
    tmp_path: Path, data: Any, tiny_tokenizer: Path
) -> None:
    """Its end-of-text id and its pattern are unknown, even if the ranks are known."""
    bare = tmp_path / "bare.tiktoken"
    shutil.copyfile(tiny_tokenizer, bare)
    write(tmp_path / "set", ids(30, SEQ_LEN + 1, "int32"), "bytes")
    with raises_error("tokenizer.no_description", "bare.meta.json", "special_tokens"):
        data(dtype="int32", tokenizer=str(bare))


def test_what_the_format_gets_wrong(tmp_path: Path, data: Any) -> None:
    with raises_error("dataset.not_found", "MDS"):
        data()
    write(tmp_path / "set", ids(5, SEQ_LEN + 1, "int32"), "ndarray:int32")
    with raises_error("dataset.wrong_column_type", "uint16", "int32"):
        data(dtype="uint16")
    with raises_error("dataset.no_column", "a_note", "z_number", "ids"):
        data(column="ids")
    with raises_error("dataset.wrong_column_type", "a_note"):
        data(column="a_note")
    with raises_error("dataset.no_split", "val"):
        data().rows("val")
    (tmp_path / "set/shard.00000.mds").unlink()
    with raises_error("shard.missing", "shard.00000.mds"):
        data()


def test_fingerprints_differ_with_what_is_read(tmp_path: Path, data: Any) -> None:
    write(tmp_path / "set", ids(5, SEQ_LEN + 1, "int32"), "bytes")
    first = data(dtype="int32").info.fingerprint
    assert first == data(dtype="int32").info.fingerprint
    assert first != data(dtype="int32", end_of_text=5).info.fingerprint


def test_its_tokenizer_goes_into_checkpoints(
    tmp_path: Path, data: Any, tiny_tokenizer: Path
) -> None:
    form = {"kind": "mds_tokens", "tokenizer": str(tiny_tokenizer)}
    config = DataConfig.model_validate({"path": tmp_path, "format": form})
    save_tokenizer(config, tmp_path / "checkpoint")
    saved = load_tokenizer(tmp_path / "checkpoint")
    assert saved.fingerprint == load_tokenizer(tiny_tokenizer).fingerprint
