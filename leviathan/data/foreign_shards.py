"""Index and files of MDS shards written by other converters.

`index.json` is read strictly: unknown keys and values are refused by name, because a wrong
assumption about the format would yield wrong samples without an error. Compressed shards are
unpacked into a cache directory, under a path derived from the index and the path of the shard.
"""

import bz2
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import zstandard
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from leviathan.console import say
from leviathan.data.shard_index import InsideFolder, read_index_json
from leviathan.errors import DataError
from leviathan.files import atomic_file

_BLOCK = 1 << 20
_UNPACKERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "zstd": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "gz": lambda file: gzip.GzipFile(fileobj=file),  # pyright: ignore[reportArgumentType]
    "bz2": lambda file: bz2.BZ2File(file),
}
_OTHER_COMPRESSIONS = ("br", "snappy")  # part of the format, but not supported here
_HASHLIB = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake_")}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Strict):
    """One file of a shard, raw or compressed; `hashes` maps algorithms to hexadecimal digests."""

    basename: InsideFolder
    bytes: int = Field(ge=0)
    hashes: dict[str, str] = {}

    @field_validator("hashes")
    @classmethod
    def _are_known(cls, hashes: dict[str, str]) -> dict[str, str]:
        for name in hashes:
            new_hash(name)
        return hashes


class ShardEntry(_Strict):
    """The entry of a shard in `index.json`, with all keys of the format."""

    version: Literal[2] = 2
    format: Literal["mds"] = "mds"
    samples: int = Field(ge=0)
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    compression: str | None = None
    hashes: list[str] = []
    size_limit: int | str | None = None
    raw_data: FileEntry
    zip_data: FileEntry | None = None

    @field_validator("compression")
    @classmethod
    def _is_known(cls, compression: str | None) -> str | None:
        known = (*_UNPACKERS, *_OTHER_COMPRESSIONS)
        if compression is not None and compression.partition(":")[0] not in known:
            raise ValueError(f"unknown compression {compression!r} (known: {', '.join(known)})")
        return compression

    @model_validator(mode="after")
    def _columns_agree(self) -> "ShardEntry":
        lengths = {len(self.column_names), len(self.column_encodings), len(self.column_sizes)}
        if len(lengths) > 1:
            raise ValueError("column_names, column_encodings and column_sizes differ in length")
        return self

    @property
    def packing(self) -> str:
        """The compression of the zip file: from `compression`, else from the suffix of its name."""
        if self.compression is not None:
            return self.compression.partition(":")[0]
        suffix = Path(self.zip_data.basename).suffix[1:] if self.zip_data is not None else ""
        return {"zst": "zstd"}.get(suffix, suffix)


def new_hash(name: str) -> Any:
    """A hash object of the named algorithm; supports the algorithms of streaming.

    Raises:
        ValueError: unknown algorithm.
    """
    if name in _HASHLIB:
        return hashlib.new(name)
    import xxhash

    if name in xxhash.algorithms_available:
        return getattr(xxhash, name)()
    known = sorted(_HASHLIB | set(xxhash.algorithms_available))
    raise ValueError(f"unknown hash {name!r} (known: {', '.join(known)})")


class ForeignShards:
    """The shards of one directory: their entries and uncompressed files.

    The constructor compares the size of every file with the index. Hashes are compared when a shard
    is unpacked and when an unpacked shard is first read from the cache. The hashes of uncompressed
    shards are only compared by `verify`, because hashing every shard on every rank costs more than
    reading the samples that the rank needs.

    Args:
        folder: contains `index.json` and the shards, which may be in subdirectories.
        cache: directory for unpacked shards; None: compressed shards are refused.

    Raises:
        DataError: the index or a shard (named in the message) cannot be used.
    """

    def __init__(self, folder: Path, cache: Path | None) -> None:
        self.folder, self._cache = folder, cache
        self.entries = read_index_json(folder / "index.json", ShardEntry)
        if not sum(entry.samples for entry in self.entries):
            raise DataError(
                "dataset.empty", f"{folder / 'index.json'} lists no samples: the dataset is empty"
            )
        self._index_digest = hashlib.sha256((folder / "index.json").read_bytes()).hexdigest()
        self._verified: set[int] = set()  # shards in the cache that this process has hashed
        for entry in self.entries:
            self._stored_file(entry)

    def file(self, number: int) -> Path:
        """Returns the uncompressed file of a shard; unpacks it into the cache if necessary.

        Raises:
            DataError: it is missing or corrupt, or the cache cannot be written.
        """
        entry = self.entries[number]
        stored, file = self._stored_file(entry)
        if file is entry.raw_data:
            return stored
        assert self._cache is not None
        raw = self._cache_folder(entry, stored) / entry.raw_data.basename
        if number not in self._verified or not raw.is_file():
            if not _is_intact(raw, entry.raw_data):
                _unpack(stored, raw, entry)
            self._verified.add(number)
        return raw

    def verify(self) -> int:
        """Compares every shard with its hashes; unpacks compressed shards.

        Returns:
            The number of shards without a hash in the index.

        Raises:
            DataError: a shard differs from the index.
        """
        for number, entry in enumerate(self.entries):
            file = self.file(number)
            if problem := _difference(file, entry.raw_data):
                raise DataError(
                    "shard.corrupt", f"{file}: this shard is corrupt: {problem}. Copy it again"
                )
            if not entry.raw_data.hashes and entry.zip_data and entry.zip_data.hashes:
                packed = self.folder / entry.zip_data.basename
                if packed.is_file() and (problem := _difference(packed, entry.zip_data)):
                    raise DataError(
                        "shard.corrupt",
                        f"{packed}: this shard is corrupt: {problem}. Copy it again",
                    )
        # The hash of a compressed file says nothing about the unpacked file in the cache.
        return sum(not entry.raw_data.hashes for entry in self.entries)

    def _stored_file(self, entry: ShardEntry) -> tuple[Path, FileEntry]:
        """The file of a shard, raw or compressed, and its entry; checks its size."""
        file = entry.raw_data
        path = self.folder / file.basename
        if not path.is_file():
            if entry.zip_data is None or not (self.folder / entry.zip_data.basename).is_file():
                raise DataError("shard.missing", f"{path}: this shard is missing. Copy it again")
            file = entry.zip_data
            path = self.folder / file.basename
            if entry.packing not in _UNPACKERS:
                raise DataError(
                    "shard.unsupported_compression",
                    f"{path}: the compression {entry.packing!r} is not supported. Write the "
                    f"shards with {', '.join(_UNPACKERS)} or without compression",
                )
            if self._cache is None:
                raise DataError(
                    "dataset.no_cache",
                    f"{path} is compressed. Set data.format.cache to a directory for unpacked "
                    "shards",
                )
        size = path.stat().st_size
        if size != file.bytes:
            kind = "truncated" if size < file.bytes else "corrupt"
            raise DataError(
                "shard.corrupt",
                f"{path}: {kind}: this shard has {size:,} bytes, index.json states "
                f"{file.bytes:,}. Copy it again",
            )
        return path, file

    def _cache_folder(self, entry: ShardEntry, packed: Path) -> Path:
        """Returns the directory of one shard's unpacked file.

        The directory depends on the index, so that a dataset that is rewritten under the same path
        does not use shards of its previous version. Without hashes, two datasets may have the same
        index; the directory then also depends on the modification time of the compressed file.
        """
        assert self._cache is not None
        assert entry.zip_data is not None
        key: list[Any] = [str(self.folder.resolve()), self._index_digest]
        if not entry.raw_data.hashes and not entry.zip_data.hashes:
            key.append(packed.stat().st_mtime_ns)
        return self._cache / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _is_intact(path: Path, entry: FileEntry) -> bool:
    """Whether the cache contains this shard; warns if it is corrupt."""
    if not path.is_file():
        return False
    problem = _difference(path, entry)
    if problem:
        say(f"warning: {path}: {problem}; unpacking it again", style="yellow")
    return not problem


def _difference(path: Path, entry: FileEntry) -> str | None:
    """Describes how a file differs from its entry; None if size and hashes are equal."""
    size = path.stat().st_size
    if size != entry.bytes:
        return f"it has {size:,} bytes, index.json states {entry.bytes:,}"
    if not entry.hashes:
        return None
    hashes = _Hashes(entry)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hashes.update(block)
    return hashes.difference()


class _Hashes:
    """The hashes of an entry, computed block by block."""

    def __init__(self, entry: FileEntry) -> None:
        self._expected = entry.hashes
        self._hashes = {name: new_hash(name) for name in entry.hashes}

    def update(self, block: bytes) -> None:
        for hash in self._hashes.values():
            hash.update(block)

    def difference(self) -> str | None:
        for name, hash in self._hashes.items():
            if hash.hexdigest() != self._expected[name].lower():
                return f"its {name} differs from index.json"
        return None


def _unpack(packed: Path, raw: Path, entry: ShardEntry) -> None:
    """Unpacks a shard into the cache and compares size and hashes.

    Several ranks and threads may unpack the same shard at the same time.
    """
    assert entry.zip_data is not None
    of_packed, of_raw, size = _Hashes(entry.zip_data), _Hashes(entry.raw_data), 0
    try:
        raw.parent.mkdir(parents=True, exist_ok=True)
        with packed.open("rb") as source, atomic_file(raw) as target:
            for block in _unpacked_blocks(packed, _Tee(source, of_packed), entry):
                of_raw.update(block)
                target.write(block)
                size += len(block)
                if size > entry.raw_data.bytes:
                    break
            if size != entry.raw_data.bytes:
                kind = "truncated" if size < entry.raw_data.bytes else "corrupt"
                raise DataError(
                    "shard.corrupt",
                    f"{packed}: {kind}: it does not unpack to the {entry.raw_data.bytes:,} bytes "
                    "that index.json states. Copy it again",
                )
            if problem := of_packed.difference():
                raise DataError("shard.corrupt", f"{packed}: corrupt: {problem}. Copy it again")
            if problem := of_raw.difference():
                raise DataError(
                    "shard.corrupt",
                    f"{packed}: corrupt: after decompression, {problem}. Copy it again",
                )
    except OSError as error:
        raise DataError(
            "shard.not_unpacked", f"{packed}: cannot be unpacked to {raw}: {error.strerror}"
        ) from None


def _unpacked_blocks(packed: Path, source: Any, entry: ShardEntry) -> Iterator[bytes]:
    with _damage_named(packed), _UNPACKERS[entry.packing](source) as unpacked:
        while block := unpacked.read(_BLOCK):
            yield block
    while source.read(_BLOCK):  # bytes after the compressed stream are part of the hash
        pass


@contextmanager
def _damage_named(packed: Path) -> Iterator[None]:
    """Converts exceptions of a decompressor to DataError; OS errors pass through."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError("shard.corrupt", f"{packed}: corrupt ({error}). Copy it again") from None


class _Tee:
    """A readable file that updates hashes with the bytes read."""

    def __init__(self, file: IO[bytes], hashes: _Hashes) -> None:
        self._file, self._hashes = file, hashes

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._hashes.update(block)
        return block
