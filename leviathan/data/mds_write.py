"""Writes MDS shards with the same bytes as streaming's writer, many samples at a time.

That writer encodes sample by sample in Python, in one process, and takes 12 s to import. A sample
is encoded as

    uint32 size of `subsets` · int64 first_document · int64 n_valid · subsets · tokens

with the columns in alphabetical order, as the format requires. `subsets` is an array of variable
length: one byte (dimensions << 2 | code of the length's width), the length, the values.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.data.mds import columns
from leviathan.files import atomic_file, write_atomic

SHARD_BYTES = 1 << 26  # the size limit in the index; `samples_per_shard` stays close to it
_BLOCK_ROWS = 512  # bytes encoded at once, in memory that is reused
_TYPICAL_DOCUMENTS = 4  # per sample; more of them only make a shard slightly larger

_FIXED = np.dtype([("size", "<u4"), ("first_document", "<i8"), ("n_valid", "<i8")])


@dataclass(frozen=True)
class ShardSamples:
    """The samples of one shard.

    Attributes:
        ids: uint16 or uint32 [samples * seq_len + 1], the part of the stream, padded; adjacent
            samples overlap by one id.
        n_valid: int64 [samples].
        first_document: int64 [samples].
        subsets: uint16, the subsets of each sample's documents, concatenated.
        documents: int64 [samples], number of documents per sample.
    """

    ids: np.ndarray
    n_valid: np.ndarray
    first_document: np.ndarray
    subsets: np.ndarray
    documents: np.ndarray

    @property
    def seq_len(self) -> int:
        """Targets per sample."""
        return (len(self.ids) - 1) // len(self.n_valid)


def samples_per_shard(seq_len: int, dtype: str) -> int:
    """Samples per shard of about 64 MiB; independent of the texts."""
    row = 4 + _FIXED.itemsize + 2 + 2 * _TYPICAL_DOCUMENTS
    row += (seq_len + 1) * np.dtype(dtype).itemsize
    return max(1, (SHARD_BYTES - 1024) // row)


def shard_name(number: int) -> str:
    """Name of shard `number`, as streaming's writer names it."""
    return f"shard.{number:05}.mds"


def write_shard(path: Path, rows: ShardSamples) -> dict[str, Any]:
    """Writes one shard atomically.

    Returns:
        The shard's entry for `index.json`.
    """
    settings = _settings(rows.seq_len, rows.ids.dtype.name)
    head = _head(rows, json.dumps(settings, sort_keys=True).encode())
    digest, size = hashlib.sha256(), 0
    with atomic_file(path) as file:
        for block in (head, *_blocks(rows)):
            digest.update(block)
            file.write(block)
            size += len(block)
    return entry(path.name, settings, len(rows.n_valid), size, digest.hexdigest())


def shard_entry(path: Path, rows: int, sha256: str, seq_len: int, dtype: str) -> dict[str, Any]:
    """The `index.json` entry of an existing shard."""
    return entry(path.name, _settings(seq_len, dtype), rows, path.stat().st_size, sha256)


def entry(name: str, settings: dict[str, Any], rows: int, size: int, sha256: str) -> dict[str, Any]:
    """The `index.json` entry of a shard."""
    raw = {"basename": name, "bytes": size, "hashes": {"sha256": sha256}}
    return settings | {"samples": rows, "raw_data": raw, "zip_data": None}


def write_index(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Writes `index.json` for the shards of a split."""
    content = json.dumps({"version": 2, "shards": entries}, sort_keys=True)
    write_atomic(folder / "index.json", content.encode())


def _settings(seq_len: int, dtype: str) -> dict[str, Any]:
    kinds = dict(sorted(columns(seq_len, dtype).items()))
    sizes = {"first_document": 8, "n_valid": 8, "subsets": None}
    sizes["tokens"] = (seq_len + 1) * np.dtype(dtype).itemsize
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": ["sha256"],
        "size_limit": SHARD_BYTES,
        "column_names": list(kinds),
        "column_encodings": list(kinds.values()),
        "column_sizes": [sizes[name] for name in kinds],
    }


def _head(rows: ShardSamples, settings: bytes) -> bytes:
    """Encodes the header: uint32 samples, uint32 offsets [samples + 1], the settings as JSON."""
    tokens = (rows.seq_len + 1) * rows.ids.itemsize
    sizes = _FIXED.itemsize + _array_sizes(rows.documents) + tokens
    offsets = np.concatenate([[0], np.cumsum(sizes)]) + 4 + 4 * (len(sizes) + 1) + len(settings)
    assert offsets[-1] < 1 << 32
    return np.uint32(len(sizes)).tobytes() + offsets.astype("<u4").tobytes() + settings


def _blocks(rows: ShardSamples) -> Any:
    """Yields the bytes of the samples, some thousands of samples at a time."""
    width, step = rows.ids.itemsize, rows.seq_len * rows.ids.itemsize
    tokens = np.ascontiguousarray(rows.ids).data.cast("B")
    first_subset = np.concatenate([[0], np.cumsum(rows.documents)])
    for begin in range(0, len(rows.n_valid), _BLOCK_ROWS):
        end = min(begin + _BLOCK_ROWS, len(rows.n_valid))
        before, ends = _before_tokens(
            rows.first_document[begin:end],
            rows.n_valid[begin:end],
            rows.subsets[first_subset[begin] : first_subset[end]],
            rows.documents[begin:end],
        )
        pieces: list[memoryview] = []
        start = 0
        for row, stop in enumerate(ends.tolist(), begin):
            pieces += (before[start:stop], tokens[row * step : (row + 1) * step + width])
            start = stop
        yield b"".join(pieces)


def _before_tokens(
    first_document: np.ndarray, n_valid: np.ndarray, subsets: np.ndarray, documents: np.ndarray
) -> tuple[memoryview, np.ndarray]:
    """Encodes the columns before the tokens of each sample, concatenated, and where each ends."""
    fixed = np.zeros(len(documents), _FIXED)
    fixed["size"] = _array_sizes(documents)
    fixed["first_document"], fixed["n_valid"] = first_document, n_valid
    ends = np.cumsum(_FIXED.itemsize + fixed["size"].astype(np.int64))
    begins = np.concatenate([[0], ends[:-1]])
    out = np.zeros(ends[-1], np.uint8)
    fields = fixed.view(np.uint8).reshape(len(fixed), -1)
    out[begins[:, None] + np.arange(_FIXED.itemsize)] = fields

    width = _length_width(documents)
    at = begins + _FIXED.itemsize
    out[at] = 1 << 2 | width >> 1  # one dimension; a length of 1, 2 or 4 bytes has code 0, 1 or 2
    for byte in range(int(width.max())):
        has = width > byte
        out[at[has] + 1 + byte] = documents[has] >> 8 * byte & 255
    # The values of all samples, concatenated, two bytes each.
    first = np.cumsum(documents) - documents
    place = np.repeat(at + 1 + width - 2 * first, documents) + 2 * np.arange(len(subsets))
    out[place], out[place + 1] = subsets & 255, subsets >> 8
    return out.data, ends


def _length_width(documents: np.ndarray) -> np.ndarray:
    """Width in bytes of the length of an array of `documents` values: 1, 2 or 4; int64."""
    return np.where(documents < 1 << 8, 1, np.where(documents < 1 << 16, 2, 4))


def _array_sizes(documents: np.ndarray) -> np.ndarray:
    return 1 + _length_width(documents) + 2 * documents
