"""Reads MDS datasets of other converters: one column of token ids, no `dataset.json`.

Their samples do not overlap, and document boundaries are not recorded. Samples of `seq_len + 1`
ids are used like ours; in samples of `seq_len` ids, the last id has no target.

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

import numpy as np
import zstandard
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from leviathan.config.run import MdsTokensFormat
from leviathan.console import say
from leviathan.data.format import FORMAT_VERSION, DatasetInfo, SplitInfo, TokenizerInfo, token_dtype
from leviathan.data.mds import InsideFolder, Sample, ShardFile, ShardReader, read_index_json
from leviathan.data.tokenizer import load_tokenizer
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


_VALIDATION_NAMES = ("val", "validation")
_VALUE_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    32: "uint32",
    33: "int32",
    64: "uint64",
    65: "int64",
}


class ForeignShardReader(ShardReader):
    """Reads the samples of one split by number; same interface as `ShardReader`.

    Args:
        folder: directory with index.json and shards.
        form: format of the samples.
        seq_len: targets per sample.
        vocab_size: larger or equal ids are rejected.
        end_of_text: the id that ends documents and pads samples.

    Raises:
        DataError: the dataset is corrupt, the column does not exist, or the samples have another
            length.
    """

    def __init__(
        self, folder: Path, form: MdsTokensFormat, seq_len: int, vocab_size: int, end_of_text: int
    ) -> None:
        self._form, self._seq_len = form, seq_len
        self._vocab_size, self._end = vocab_size, end_of_text
        self._files = ForeignShards(folder, form.cache)
        self._attach(folder, [entry.samples for entry in self._files.entries])

    @property
    def ids_per_row(self) -> int:
        """Number of ids per stored sample, taken from the first one."""
        return self[0].n_valid

    def __getitem__(self, number: int) -> Sample:
        row = super().__getitem__(number)
        ids = row.tokens[: row.n_valid]
        if row.n_valid not in (self._seq_len, self._seq_len + 1):
            raise DataError(
                "dataset.wrong_length",
                f"{self.directory}: sample {number} has {row.n_valid:,} ids. With "
                f"model.seq_len={self._seq_len}, samples of {self._seq_len} or "
                f"{self._seq_len + 1} can be trained on: set model.seq_len={row.n_valid} or "
                f"{row.n_valid - 1}, or check data.format.dtype",
            )
        wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(wrong):
            raise DataError(
                "dataset.invalid_id",
                f"{self.directory}: sample {number} contains the id {wrong[0]}, but "
                f"{self._form.tokenizer} has {self._vocab_size:,} ids. Check data.format "
                "(dtype, tokenizer, vocab_size)",
            )
        padding = self._seq_len + 1 - row.n_valid
        return Sample(
            tokens=np.concatenate([ids, np.full(padding, self._end)]),
            # Documents are not numbered: those of each sample count as its own.
            first_document=number * (self._seq_len + 1),
            subsets=np.zeros(int((ids[:-1] == self._end).sum()) + 1, np.int64),
            n_valid=row.n_valid,
        )

    def verify(self) -> int:
        """Compares the hashes of every shard with index.json.

        Returns:
            The number of shards without a hash in index.json.

        Raises:
            DataError: a shard differs from index.json.
        """
        return self._files.verify()

    def _file_name(self, shard: int) -> str:
        return self._files.entries[shard].raw_data.basename

    def _open_shard(self, index: int) -> "_ForeignShard":
        return _ForeignShard(self._files.file(index), self._files.entries[index], self._form)


class _ForeignShard(ShardFile):
    """A shard of another converter."""

    def __init__(self, path: Path, entry: ShardEntry, form: MdsTokensFormat) -> None:
        if form.column not in entry.column_names:
            raise DataError(
                "dataset.no_column",
                f"{path}: no column {form.column!r} (columns: {', '.join(entry.column_names)}). "
                "Set data.format.column",
            )
        self._sizes = entry.column_sizes
        self._column = entry.column_names.index(form.column)
        kind, *self._encoding = entry.column_encodings[self._column].split(":")
        known = self._encoding[0] if self._encoding and self._encoding[0] else None
        if kind not in ("bytes", "ndarray"):
            raise DataError(
                "dataset.wrong_column_type",
                f"{path}: column {form.column!r} is {kind}, expected bytes or ndarray",
            )
        if kind == "bytes" and form.dtype is None:
            raise DataError(
                "dataset.no_dtype",
                f"{path}: column {form.column!r} is plain bytes. Set data.format.dtype",
            )
        if known and known not in _VALUE_DTYPES.values():
            raise DataError(
                "dataset.wrong_column_type",
                f"{path}: column {form.column!r} has the type {known}, but ids are integers "
                f"(expected {', '.join(_VALUE_DTYPES.values())}). Set data.format.column",
            )
        if known and form.dtype and known != form.dtype:
            raise DataError(
                "dataset.wrong_column_type",
                f"{path}: data.format.dtype is {form.dtype}, but the column has the type {known}",
            )
        self._kind, self._dtype = kind, known or form.dtype
        super().__init__(path, entry.samples)

    def row(self, index: int) -> Sample:
        data = self.bytes_of(index)
        free = [place for place, size in enumerate(self._sizes) if size is None]
        sizes = list(self._sizes)
        for place, size in zip(free, np.frombuffer(data, np.uint32, len(free)), strict=True):
            sizes[place] = int(size)
        begin = 4 * len(free) + sum(filter(None, sizes[: self._column]))
        ids = self._decode(data[begin : begin + (sizes[self._column] or 0)])
        none = np.zeros(0, np.int64)
        return Sample(ids.astype(np.int64), first_document=0, subsets=none, n_valid=len(ids))

    def _decode(self, data: bytes) -> np.ndarray:
        """The values of a column; an encoded array may begin with its dtype and shape."""
        dtype, begin = self._dtype, 0
        if self._kind == "ndarray" and not self._encoding:
            dtype, begin = _VALUE_DTYPES[data[0]], 1
        if self._kind == "ndarray" and len(self._encoding) < 2:
            begin += 1 + (data[begin] >> 2) * (1 << (data[begin] & 3))
        return np.frombuffer(data[begin:], np.dtype(dtype))


def describe_foreign(path: Path, form: MdsTokensFormat, seq_len: int) -> DatasetInfo:
    """Builds the dataset description; unknown numbers of documents and bytes are 0.

    Raises:
        DataError: as `ForeignShardReader`, or the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(form.tokenizer)
    vocab_size = form.vocab_size or tokenizer.vocab_size
    end = tokenizer.end_of_text if form.end_of_text is None else form.end_of_text
    digest = hashlib.sha256(json.dumps([tokenizer.fingerprint, vocab_size, end, seq_len]).encode())
    splits: dict[str, SplitInfo] = {}
    for name, folder in split_dirs(path).items():
        rows = ForeignShardReader(folder, form, seq_len, vocab_size, end)
        digest.update((folder / "index.json").read_bytes())
        targets = len(rows) * (rows.ids_per_row - 1)
        splits[name] = SplitInfo(
            rows=len(rows),
            ids=targets + 1,  # of a stream with as many targets
            tokens=targets,
            padded=len(rows) * seq_len - targets,
            documents=0,
            bytes_of_text=0,
        )
    return DatasetInfo(
        format_version=FORMAT_VERSION,
        fingerprint=digest.hexdigest(),
        vocab_size=vocab_size,
        seq_len=seq_len,
        dtype=token_dtype(vocab_size),
        tokenizer=TokenizerInfo(
            name=tokenizer.name, fingerprint=tokenizer.fingerprint, end_of_text=end
        ),
        subsets=["unnamed"],
        splits=splits,
        documents=0,
        empty=0,
        duplicates=0,
        rejected=0,
        dropped_tail_tokens=0,
        sources=[],
        config={"format": form.model_dump(mode="json")},
    )


def split_dirs(path: Path) -> dict[str, Path]:
    """Split → directory: `path` is the training split, or contains train and possibly val.

    Raises:
        DataError: there is no index.json, or one next to those of the splits, as a merge over all
            splits writes: reading it would train on the validation split.
    """
    if (path / "index.json").is_file():
        below = [name for name in ("train", *_VALIDATION_NAMES) if (path / name).is_dir()]
        if inside := [name for name in below if (path / name / "index.json").is_file()]:
            raise DataError(
                "dataset.ambiguous",
                f"{path}: index.json is next to "
                f"{' and '.join(f'{n}/index.json' for n in inside)}: it is unclear which "
                "samples are for training. Remove the index.json above these directories, or "
                "set data.path to one of them",
            )
        return {"train": path}
    if not (path / "train" / "index.json").is_file():
        raise DataError(
            "dataset.not_found",
            f"{path} is not an MDS dataset: it contains neither index.json nor train/index.json",
        )
    found = {"train": path / "train"}
    for name in _VALIDATION_NAMES:
        if (path / name / "index.json").is_file():
            found["val"] = path / name
    return found
