"""The MDS writer compared with the library's byte for byte, and the reader of complete shards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
from errors import raises_error

from leviathan.data.mds import (
    SHARD_BYTES,
    ShardSamples,
    columns,
    read_shard,
    samples_per_shard,
    shard_entry,
    shard_name,
    write_index,
    write_shard,
)

SHAPES = [(512, "uint32", 300), (1, "uint16", 50), (2000, "uint16", 40), (7, "uint32", 20_000)]


def random_rows(seq_len: int, dtype: str, rows: int) -> ShardSamples:
    random = np.random.default_rng(seq_len)
    documents = random.integers(1, 5, rows)
    documents[rows // 2] = min(seq_len + 1, 300)  # a length that takes two bytes
    return ShardSamples(
        ids=random.integers(0, 1 << 16, rows * seq_len + 1).astype(dtype),
        n_valid=np.append(np.full(rows - 1, seq_len + 1), max(2, seq_len // 2)),
        first_document=np.cumsum(documents),
        subsets=random.integers(0, 1 << 16, documents.sum()).astype(np.uint16),
        documents=documents,
    )


def as_samples(rows: ShardSamples) -> list[dict[str, Any]]:
    step, first = rows.seq_len, np.cumsum(rows.documents) - rows.documents
    return [
        {
            "tokens": rows.ids[number * step : (number + 1) * step + 1],
            "n_valid": int(rows.n_valid[number]),
            "first_document": int(rows.first_document[number]),
            "subsets": rows.subsets[first[number] : first[number] + rows.documents[number]],
        }
        for number in range(len(rows.n_valid))
    ]


@pytest.mark.parametrize(("seq_len", "dtype", "count"), SHAPES)
def test_the_bytes_are_those_of_the_library(
    tmp_path: Path, seq_len: int, dtype: str, count: int
) -> None:
    shards = [random_rows(seq_len, dtype, count), random_rows(seq_len, dtype, count // 2)]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    entries = [write_shard(ours / shard_name(place), rows) for place, rows in enumerate(shards)]
    write_index(ours, entries)
    writer = streaming.MDSWriter(
        out=str(theirs),
        columns=columns(seq_len, dtype),
        hashes=["sha256"],
        size_limit=SHARD_BYTES,
    )
    for rows in shards:
        for sample in as_samples(rows):
            writer.write(sample)
        writer.flush_shard()
        writer._reset_cache()
    writer.finish()
    names = {"index.json", "shard.00000.mds", "shard.00001.mds"}
    assert names == {path.name for path in ours.iterdir()} == {p.name for p in theirs.iterdir()}
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert json.loads((ours / "index.json").read_text())["shards"] == entries


@pytest.mark.parametrize(("seq_len", "dtype", "count"), SHAPES)
def test_a_shard_is_read_back(tmp_path: Path, seq_len: int, dtype: str, count: int) -> None:
    rows, path = random_rows(seq_len, dtype, count), tmp_path / "shard.00003.mds"
    entry = write_shard(path, rows)
    found = read_shard(path, seq_len, dtype)
    for name in ("n_valid", "first_document", "subsets", "documents"):
        assert np.array_equal(getattr(found, name), getattr(rows, name))
    assert np.array_equal(found.tokens[:, :-1].reshape(-1), rows.ids[:-1])
    assert np.array_equal(found.tokens[:, -1], rows.ids[seq_len::seq_len])
    assert shard_entry(path, count, found.sha256, seq_len, dtype) == entry
    content = path.read_bytes()
    for corrupt in (content[:-1], content + b"x", b"", content[:3]):
        path.write_bytes(corrupt)
        with raises_error("shard.corrupt", "shard.00003.mds"):
            read_shard(path, seq_len, dtype)


@pytest.mark.parametrize(("seq_len", "dtype"), [(1, "uint16"), (512, "uint32"), (10**8, "uint32")])
def test_shards_are_about_as_large_as_the_index_says(seq_len: int, dtype: str) -> None:
    rows = samples_per_shard(seq_len, dtype)
    row = (seq_len + 1) * np.dtype(dtype).itemsize + 20 + 4 + 2 + 2 * 4
    assert rows == 1 or 0.99 * SHARD_BYTES < rows * row < SHARD_BYTES
