"""Reads MDS shards: single samples in any order, or a complete shard at once.

Tests compare every sample with that of streaming's reader. This reader exists because importing
streaming takes 12 s of CPU time in every rank, and its reader opens the shard again for each
sample.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel, Field

from leviathan.data.format import DatasetInfo
from leviathan.data.shard_index import InsideFolder, read_index_json
from leviathan.errors import DataError
from leviathan.locks import wait_for_lock

OPEN_SHARDS = 64  # open files; a shuffle window touches few shards at a time

OTHER_COLUMNS = {"first_document": "int", "n_valid": "int", "subsets": "ndarray:uint16"}


class Hashes(BaseModel):
    """Digests of a shard that `leviathan prep` requests from the writer."""

    sha256: str


class RawData(BaseModel):
    """Name, size and hashes of a shard's file."""

    basename: InsideFolder
    bytes: int
    hashes: Hashes


class ShardEntry(BaseModel):
    """The keys of a shard's entry in `index.json` that are used; the writer adds others."""

    version: Literal[2] = 2
    format: Literal["mds"] = "mds"
    samples: int = Field(ge=0)
    column_names: list[str]
    column_encodings: list[str]
    raw_data: RawData


def columns(seq_len: int, dtype: str) -> dict[str, str]:
    """MDS column → encoding, in a dataset with samples of `seq_len` + 1 ids."""
    return OTHER_COLUMNS | {"tokens": f"ndarray:{dtype}:{seq_len + 1}"}


@dataclass(frozen=True)
class Sample:
    """One sample of a split; see `leviathan.data.format` for the columns.

    Attributes:
        tokens: int64 [seq_len + 1].
        subsets: int64 [documents in the sample].
    """

    tokens: np.ndarray
    first_document: int
    subsets: np.ndarray
    n_valid: int


class OpenShard(Protocol):
    """Reader of the samples of one open shard."""

    def row(self, index: int) -> Sample:
        """Sample `index` of the shard."""
        ...


class ShardReader:
    """Reads the samples of one split (`DATA/train`) by number.

    Raises:
        DataError: index.json or a shard is missing, truncated or of another format; the message
            names the file.
    """

    def __init__(self, split_dir: Path) -> None:
        self.shards = read_index(split_dir)
        self._attach(split_dir, [shard.samples for shard in self.shards])

    def _attach(self, directory: Path, shard_rows: list[int], at_once: int = OPEN_SHARDS) -> None:
        self.directory = directory
        self.shard_rows = np.array(shard_rows, np.int64)
        self._ends = np.cumsum(self.shard_rows)
        self._open: Callable[[int], OpenShard] = lru_cache(at_once)(self._open_shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        shard = int(np.searchsorted(self._ends, number, side="right"))
        index = int(number - self._ends[shard] + self.shard_rows[shard])
        try:
            return self._open(shard).row(index)
        except (ValueError, LookupError, TypeError) as error:
            file = self.directory / self._file_name(shard)
            raise DataError(
                "shard.corrupt", f"{file}: sample {index} is corrupt ({error}). Copy it again"
            ) from None

    def shards_of(self, numbers: Sequence[int] | np.ndarray) -> list[int]:
        """The shards that contain these samples, in ascending order."""
        return np.unique(np.searchsorted(self._ends, numbers, side="right")).tolist()

    def prefetch(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Announces that these samples will be needed soon."""

    def _file_name(self, shard: int) -> str:
        return self.shards[shard].raw_data.basename

    def _open_shard(self, index: int) -> "OpenShard":
        entry = self.shards[index]
        return open_shard(self.directory / entry.raw_data.basename, entry)


def read_index(split_dir: Path, complete: bool = True) -> list[ShardEntry]:
    """Reads the shard entries of `index.json` and compares the size of each file.

    Args:
        split_dir: directory of one split.
        complete: False: the files may be missing and are not checked.

    Raises:
        DataError: see `ShardReader`.
    """
    path = split_dir / "index.json"
    shards = read_index_json(path, ShardEntry)
    if not shards:
        raise DataError("dataset.empty", f"{path} lists no shards: the dataset is empty")
    for shard in shards if complete else ():
        file, size = split_dir / shard.raw_data.basename, shard.raw_data.bytes
        if not file.is_file():
            packed = next(file.parent.glob(f"{file.name}.*"), None)
            hint = f"only {packed.name} exists. Unpack it" if packed else "copy it again"
            raise DataError("shard.missing", f"{file}: this shard is missing: {hint}")
        if file.stat().st_size != size:
            raise DataError(
                "shard.corrupt",
                f"{file}: this shard has {file.stat().st_size:,} bytes instead of {size:,} "
                "(truncated?). Copy or prepare the dataset again",
            )
    return shards


def open_split(data: Path, info: DatasetInfo, name: str) -> ShardReader:
    """Opens a split after comparing its index with dataset.json.

    Raises:
        DataError: the split does not exist, the files are inconsistent, or see `ShardReader`.
    """
    info.split(name)
    rows = ShardReader(data / name)
    check_split(rows, info, name)
    return rows


def check_split(rows: ShardReader, info: DatasetInfo, name: str) -> None:
    """Compares a split's index with dataset.json.

    Raises:
        DataError: the split does not exist, or they are inconsistent.
    """
    split = info.split(name)
    if len(rows) != split.rows:
        raise DataError(
            "dataset.corrupt",
            f"{rows.directory}: {len(rows)} samples, but dataset.json states {split.rows}",
        )
    expected = columns(info.seq_len, info.dtype)
    for shard in rows.shards:
        found = dict(zip(shard.column_names, shard.column_encodings, strict=False))
        if found != expected:
            raise DataError(
                "dataset.corrupt",
                f"{rows.directory}: {shard.raw_data.basename} has the columns {found}, but "
                f"seq_len and dtype in dataset.json require {expected}",
            )


class ShardFile:
    """One open shard: uint32 n, uint32 offsets [n + 1], a JSON header, then the samples' bytes.

    Read instead of memory-mapped: access to a mapped file that was truncated kills the process.

    Raises:
        DataError: its number of samples differs from its entry in `index.json`.
    """

    def __init__(self, path: Path, samples: int) -> None:
        self._file = path.open("rb", buffering=0)
        rows = int.from_bytes(self._read(0, 4), "little")
        if rows != samples:
            raise DataError(
                "shard.corrupt", f"{path}: contains {rows} samples, index.json states {samples}"
            )
        self._offsets = np.frombuffer(self._read(4, 4 * (rows + 2)), np.uint32)

    def bytes_of(self, index: int) -> bytes:
        """The bytes of one sample."""
        return self._read(int(self._offsets[index]), int(self._offsets[index + 1]))

    def hold(self) -> None:
        """Keeps a cache from removing the file while it is open here."""
        wait_for_lock(self._file, shared=True)

    def _read(self, begin: int, end: int) -> bytes:
        # Unlike seek and read, thread-safe.
        return os.pread(self._file.fileno(), end - begin, begin)


class _Shard(ShardFile):
    """A shard that `leviathan prep` wrote."""

    def __init__(self, path: Path, entry: ShardEntry) -> None:
        found = dict(zip(entry.column_names, entry.column_encodings, strict=True))
        tokens = found.get("tokens", "").split(":")
        others = {name: kind for name, kind in found.items() if name != "tokens"}
        if tokens[0] != "ndarray" or len(tokens) != 3 or others != OTHER_COLUMNS:
            raise DataError(
                "shard.unknown_columns",
                f"{path}: not written by `leviathan prep` (columns {found})",
            )
        self._dtype, self._width = np.dtype(tokens[1]), int(tokens[2])
        super().__init__(path, entry.samples)

    def row(self, index: int) -> Sample:
        # [subsets' size: 4] [first_document: 8] [n_valid: 8] [subsets] [tokens]
        data = self.bytes_of(index)
        subsets_end = 20 + int.from_bytes(data[:4], "little")
        first_document, n_valid = np.frombuffer(data, np.int64, 2, 4).tolist()
        if not 0 < n_valid <= self._width:
            raise ValueError(f"{n_valid} valid ids")
        # A variable-length array begins with a byte (dimensions << 2 | width code) and its length.
        length_bytes = 1 << (data[20] & 3)
        subsets = np.frombuffer(data[21 + length_bytes : subsets_end], np.uint16)
        tokens = np.frombuffer(data, self._dtype, self._width, subsets_end)
        return Sample(tokens.astype(np.int64), first_document, subsets.astype(np.int64), n_valid)


def open_shard(path: Path, entry: ShardEntry) -> _Shard:
    """Opens a shard that `leviathan prep` wrote.

    Raises:
        DataError: another program wrote it, or it is corrupt.
    """
    return _Shard(path, entry)


@dataclass(frozen=True)
class ShardContent:
    """All samples of one shard; the columns are described in `leviathan.data.format`.

    Attributes:
        tokens: uint16 or uint32 [samples, seq_len + 1].
        n_valid: int64 [samples].
        first_document: int64 [samples].
        subsets: uint16, those of all samples concatenated.
        documents: int64 [samples], number of documents per sample.
        sha256: hash of the file.
    """

    tokens: np.ndarray
    n_valid: np.ndarray
    first_document: np.ndarray
    subsets: np.ndarray
    documents: np.ndarray
    sha256: str


def read_shard(path: Path, seq_len: int, dtype: str) -> ShardContent:
    """Reads all samples of a shard that `leviathan prep` wrote; needs twice its size, about 128
    MiB.

    Raises:
        DataError: it cannot be read, or is inconsistent.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError("shard.unreadable", f"{path}: cannot be read ({error.strerror})") from None
    try:
        return _parse_shard(data, seq_len, np.dtype(dtype))
    except (ValueError, IndexError) as error:
        raise DataError(
            "shard.corrupt", f"{path}: corrupt ({error}). Copy or prepare it again"
        ) from None


def _parse_shard(data: bytes, seq_len: int, dtype: np.dtype) -> ShardContent:
    rows, width = int.from_bytes(data[:4], "little"), (seq_len + 1) * dtype.itemsize
    offsets = np.frombuffer(data, np.uint32, rows + 1, 4).astype(np.int64)
    if offsets[-1] != len(data):
        raise ValueError(f"{len(data)} bytes instead of {offsets[-1]}")
    begins, ends = offsets[:-1], offsets[1:]
    content = np.frombuffer(data, np.uint8)
    fields = content[begins[:, None] + np.arange(22)]
    sizes = _column(fields, 0, np.uint32)
    if (ends - begins != 20 + sizes + width).any() or (fields[:, 20] >> 2 != 1).any():
        raise ValueError("samples with other columns")
    before = 1 + (1 << (fields[:, 20] & 3).astype(np.int64))
    documents = (sizes - before) // 2
    first = np.cumsum(documents) - documents
    total = int(documents.sum())
    at = np.repeat(begins + 20 + before - 2 * first, documents) + 2 * np.arange(total)
    view = memoryview(data)
    tokens = b"".join([view[end - width : end] for end in ends.tolist()])
    return ShardContent(
        tokens=np.frombuffer(tokens, dtype).reshape(rows, seq_len + 1),
        n_valid=_column(fields, 12, np.int64),
        first_document=_column(fields, 4, np.int64),
        subsets=content[at] | content[at + 1].astype(np.uint16) << 8,
        documents=documents,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _column(fields: np.ndarray, first: int, dtype: type) -> np.ndarray:
    """The number at byte `first` of each sample, int64 [samples]."""
    end = first + np.dtype(dtype).itemsize
    return np.ascontiguousarray(fields[:, first:end]).view(dtype)[:, 0].astype(np.int64)
