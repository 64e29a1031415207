"""Remote datasets: shards are downloaded when needed into a cache directory of bounded size.

All ranks of a node share the directory, and so may several runs. A process that has a shard open
holds a lock on it, which prevents its removal and which the system releases when the process dies,
so that nothing needs cleaning up. The client of streaming keeps this state in shared memory, which
outlives a killed run.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
from typing_extensions import override

from leviathan.console import say
from leviathan.credentials import without_credentials
from leviathan.data.filesystem import open_filesystem, readable_error
from leviathan.data.format import COUNTS_FILE, DATASET_FILE, DatasetInfo
from leviathan.data.mds import (
    OPEN_SHARDS,
    ShardEntry,
    ShardReader,
    check_split,
    open_shard,
    read_index,
)
from leviathan.data.tokenizer import META_FILE, RANKS_FILE
from leviathan.errors import DataError
from leviathan.files import write_atomic
from leviathan.formatting import format_bytes
from leviathan.locks import is_file_at, try_lock, wait_for_lock

_MARK = ".cache-of"  # contains the URL and marks a directory whose other files may be removed
_BLOCK = 1 << 22
_ATTEMPTS = 4  # per file, after 1, 2 and 4 s
_EXTRA_SHARDS = 2  # shards in addition to those of one window: a partial one, and the next one


class ShardCache:
    """The local cache of a dataset at `url`.

    Args:
        url: a directory that `leviathan prep` wrote, on any filesystem of fsspec.
        folder: directory of this cache only.
        limit: maximum bytes of shards to keep; None: all.
    """

    def __init__(self, url: str, folder: Path, limit: int | None) -> None:
        self._url, self.folder, self._limit = url.rstrip("/"), folder, limit
        self._fs, self._root = open_filesystem(self._url)

    def open(self) -> DatasetInfo:
        """Downloads everything except the shards, and returns the dataset's description.

        Raises:
            DataError: the dataset is missing or corrupt, or the directory is not a cache of this
                dataset.
        """
        mark, here = self.folder / _MARK, self.folder / DATASET_FILE
        if not mark.exists() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise DataError(
                "cache.not_empty",
                f"{self.folder} is not empty and not a cache. With data.remote, data.path must "
                "be a separate directory: shards in it are removed",
            )
        try:
            content = self._read(DATASET_FILE)
        except OSError as error:
            if not here.is_file():
                raise DataError(
                    "dataset.not_found", f"{self._url}/{DATASET_FILE}: {error}: no dataset found"
                ) from None
            say(f"warning: {self._url} cannot be reached ({error}): using {self.folder}", "yellow")
            return DatasetInfo.load(self.folder)
        if here.is_file() and here.read_bytes() != content:
            raise DataError(
                "cache.other_dataset",
                f"{self.folder} contains shards of another dataset than {self._url}. Choose "
                "another data.path, or remove the directory",
            )
        for split in ("train", "val"):
            (self.folder / split).mkdir(parents=True, exist_ok=True)
        write_atomic(mark, without_credentials(self._url).encode())
        for name in (RANKS_FILE, META_FILE, COUNTS_FILE, "train/index.json", "val/index.json"):
            if not (self.folder / name).is_file():
                with suppress(FileNotFoundError):  # each process that needs it reports the error
                    write_atomic(self.folder / name, self._read(name))
        write_atomic(here, content)
        return DatasetInfo.load(self.folder)

    def rows(self, info: DatasetInfo, split: str) -> "RemoteShardReader":
        """Returns a reader of the samples of a split.

        Raises:
            DataError: the split does not exist, or is corrupt.
        """
        rows = RemoteShardReader(self, split)
        check_split(rows, info, split)
        return rows

    def check_limit(self, window: int) -> None:
        """Raises an error if the limit is so low that shards would be downloaded repeatedly.

        Args:
            window: samples shuffled together, any of which may be the next.

        Raises:
            DataError: the shards of one window exceed the limit.
        """
        if self._limit is None:
            return
        shards = read_index(self.folder / "train", complete=False)
        rows = sum(shard.samples for shard in shards) / len(shards)
        spanned = min(len(shards), int(-(-window // rows)) + _EXTRA_SHARDS)
        least = spanned * max(shard.raw_data.bytes for shard in shards)
        if self._limit < least:
            raise DataError(
                "cache.limit_too_small",
                f"data.cache_limit is {format_bytes(self._limit)}, but a shuffle window of "
                f"{window:,} samples needs {spanned} shards: increase it to {format_bytes(least)}, "
                "or lower data.shuffle_window",
            )

    def at_once(self, shard_bytes: int) -> int:
        """Number of shards of this size that one process may hold open."""
        if self._limit is None:
            return OPEN_SHARDS
        return max(1, min(OPEN_SHARDS, self._limit // max(1, shard_bytes) - _EXTRA_SHARDS))

    def fetch(self, split: str, entry: ShardEntry) -> Path:
        """Returns the local file of a shard; downloads it if necessary.

        Raises:
            DataError: it cannot be downloaded, or differs from the index.
        """
        name, size = entry.raw_data.basename, entry.raw_data.bytes
        path = self.folder / split / name
        with suppress(FileNotFoundError):
            if path.stat().st_size == size:
                os.utime(path)  # the most recently removed shard
                return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked_part(path.with_name(f".{path.name}.part")) as (part, file):
            if not path.is_file() or path.stat().st_size != size:
                self._download(f"{split}/{name}", entry, file)
                part.replace(path)
            else:  # another process has downloaded it meanwhile
                part.unlink()
        return path

    def _download(self, name: str, entry: ShardEntry, into: IO[bytes]) -> None:
        expected = entry.raw_data
        reason = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            into.seek(0)
            into.truncate()
            digest = hashlib.sha256()
            try:
                for block in self._blocks(name):
                    digest.update(block)
                    into.write(block)
            except ConnectionError as error:
                reason = str(error)
                continue
            into.flush()
            if into.tell() == expected.bytes and digest.hexdigest() == expected.hashes.sha256:
                return
            reason = f"{into.tell():,} bytes that differ from the {expected.bytes:,} of index.json"
        raise DataError(
            "shard.not_fetched", f"{self._url}/{name}: this shard cannot be downloaded ({reason})"
        )

    def _blocks(self, name: str) -> Iterator[bytes]:
        """Downloads a file; exceptions of the filesystem are raised as ConnectionError."""
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as far:
                while block := far.read(_BLOCK):
                    yield block
        except Exception as error:
            raise ConnectionError(str(readable_error(error))) from None

    def _read(self, name: str) -> bytes:
        try:
            return self._fs.cat_file(f"{self._root}/{name}")
        except Exception as error:
            raise readable_error(error) from None

    def evict(self) -> None:
        """Removes the least recently used closed shards until the limit is met."""
        if self._limit is None:
            return
        with (self.folder / _MARK).open("rb") as mark:
            wait_for_lock(mark)
            found = [
                (p.stat(), p) for s in ("train", "val") for p in (self.folder / s).rglob("*.mds")
            ]
            total = sum(stat.st_size for stat, _ in found)
            for stat, path in sorted(found, key=lambda pair: pair[0].st_mtime):
                if total <= self._limit:
                    return
                if _removed(path):
                    total -= stat.st_size


class RemoteShardReader(ShardReader):
    """Reads the samples of one split whose shards are partly cached."""

    def __init__(self, cache: ShardCache, split: str) -> None:
        self._cache, self._split = cache, split
        self.shards = read_index(cache.folder / split, complete=False)
        at_once = cache.at_once(max(shard.raw_data.bytes for shard in self.shards))
        rows = [shard.samples for shard in self.shards]
        self._attach(cache.folder / split, rows, at_once)
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._fetching: Future[None] | None = None

    @override
    def _open_shard(self, index: int):
        entry = self.shards[index]
        while True:
            path = self._cache.fetch(self._split, entry)
            with suppress(FileNotFoundError):  # removed meanwhile: download it again
                shard = open_shard(path, entry)
                shard.hold()
                self._cache.evict()
                return shard

    @override
    def prefetch(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Downloads the shards of these samples in the background; access raises errors."""
        if self._fetching is None or self._fetching.done():
            self._fetching = self._fetcher.submit(self._fetch, self.shards_of(numbers))

    def _fetch(self, shards: Sequence[int]) -> None:
        for shard in shards:
            self._cache.fetch(self._split, self.shards[shard])
            self._cache.evict()


@contextmanager
def _locked_part(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Opens a file for writing by one process at a time; others wait."""
    while True:
        with path.open("ab") as file:
            # Polls: once renamed, the file is a shard that others may keep locked for long.
            while is_file_at(path, file):
                if try_lock(file):
                    if is_file_at(path, file):
                        yield path, file
                        return
                    break
                time.sleep(0.02)


def _removed(path: Path) -> bool:
    """Removes a file unless a process has locked it; returns whether it was removed."""
    try:
        with path.open("rb") as file:
            if not try_lock(file):
                return False
            path.unlink()
    except FileNotFoundError:
        pass
    return True
