"""Reads and writes MDS shards and their list, `index.json`.

Tests compare every sample with that of streaming's reader, and all written bytes with those of its
writer. This module exists because importing streaming takes 12 s of CPU time in every rank; its
reader opens the shard again for each sample, and its writer encodes sample by sample in Python, in
one process.

A sample is encoded as

    uint32 size of `subsets` · int64 first_document · int64 n_valid · subsets · tokens

with the columns in alphabetical order, as the format requires. `subsets` is an array of variable
length: one byte (dimensions << 2 | code of the length's width), the length, the values.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Protocol, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from leviathan.data.format import DatasetInfo
from leviathan.errors import DataError
from leviathan.files import atomic_file, write_atomic
from leviathan.locks import wait_for_lock


class _File(Protocol):
    @property
    def basename(self) -> str: ...


class _ShardJson(Protocol):
    @property
    def raw_data(self) -> _File: ...


Entry = TypeVar("Entry", bound=_ShardJson)


def _check_inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a path inside the directory of index.json")
    if str(path) != name:  # so that one file has one name
        raise ValueError(f"{name!r} is not in normal form, expected {str(path)!r}")
    return name


# The path of a shard relative to index.json; `merge_index` of streaming includes subfolders.
InsideFolder = Annotated[str, AfterValidator(_check_inside)]


class _Versioned(BaseModel):
    version: Literal[2] = 2


def read_index_json(path: Path, entry: type[Entry]) -> list[Entry]:
    """Reads the shards that an `index.json` lists.

    Args:
        path: path of the file.
        entry: pydantic model of one shard's entry.

    Raises:
        DataError: the file cannot be read, does not match `entry`, or lists a file twice.
    """
    try:
        content = json.loads(path.read_bytes())
        _Versioned.model_validate(content)
        entries: Any = dict[Literal["shards"], list[entry]]  # pyright: ignore
        shards = TypeAdapter(entries).validate_python({"shards": content["shards"]})["shards"]
    except OSError as error:
        raise DataError(
            "dataset.incomplete", f"{path}: {error.strerror}: the dataset is incomplete"
        ) from None
    except ValidationError as error:
        raise DataError("dataset.corrupt", _explain(path, error.errors()[0])) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(
            "dataset.corrupt", f"{path} is empty or corrupt. Copy or prepare the dataset again"
        ) from None
    names = Counter(file.basename for shard in shards for file in _files(shard))
    if twice := [name for name, count in names.items() if count > 1]:
        raise DataError(
            "dataset.corrupt",
            f"{path} lists the shard {twice[0]} {names[twice[0]]} times. Write the index again; "
            "if several directories were merged, include the directory of each shard in its "
            "basename",
        )
    return shards


def _files(shard: Any) -> list[_File]:
    """The files of a shard: raw, and compressed where there is such an entry."""
    packed = getattr(shard, "zip_data", None)
    return [shard.raw_data, packed] if packed is not None else [shard.raw_data]


def _explain(path: Path, error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "literal_error":
        expected = error["ctx"]["expected"]
        return f"{path}: {where} is {error['input']!r}, expected {expected}"
    if error["type"] == "extra_forbidden":
        return f"{path}: {where}: unknown key, which may change the meaning of the shards"
    if error["type"] == "value_error":
        return f"{path}: {where}: {error['ctx']['error']}"
    return (
        f"{path} is empty or corrupt ({where}: {error['msg']}). Copy or prepare the dataset again"
    )


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
    """Reads all samples of a shard of `leviathan prep`; needs twice its size, about 128 MiB.

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
