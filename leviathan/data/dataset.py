"""The dataset of a run: prepared by `leviathan prep`, or a foreign one with its `format`."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from leviathan.config.run import DataConfig, MdsTokensFormat
from leviathan.data.foreign_mds import ForeignShardReader, describe_foreign, split_dirs
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import ShardReader, open_split
from leviathan.data.remote import ShardCache
from leviathan.data.tokenizer import META_FILE, RANKS_FILE, Tokenizer, load_tokenizer

TOKENIZER_FILES = (RANKS_FILE, META_FILE)
LARGE_TOKENIZER = 4 << 20  # o200k_base's 200,000 ranks


@dataclass(frozen=True)
class Dataset:
    """Location and description of a dataset."""

    path: Path
    info: DatasetInfo
    format: MdsTokensFormat | None = None
    cache: ShardCache | None = None  # for a remote dataset

    def rows(self, split: str) -> ShardReader:
        """Returns a reader of the samples of a split.

        Raises:
            DataError: the split does not exist, or is corrupt.
        """
        if self.cache is not None:
            return self.cache.rows(self.info, split)
        if self.format is None:
            return open_split(self.path, self.info, split)
        self.info.split(split)
        return ForeignShardReader(
            split_dirs(self.path)[split],
            self.format,
            self.info.seq_len,
            self.info.vocab_size,
            self.info.tokenizer.end_of_text,
        )


def open_dataset(data: DataConfig | Path, seq_len: int | None = None) -> Dataset:
    """Opens the dataset of a run, or a prepared dataset in a directory.

    Args:
        data: a run's `data` section, or a directory.
        seq_len: `model.seq_len`; a foreign dataset does not record it.

    Raises:
        DataError: the dataset is missing, corrupt or unreachable, or does not match `data.format`.
    """
    if isinstance(data, Path):
        return Dataset(data, DatasetInfo.load(data))
    if data.remote is not None:
        cache = ShardCache(data.remote, data.path, data.cache_limit)
        info = cache.open()
        cache.check_limit(data.shuffle_window)
        return Dataset(data.path, info, cache=cache)
    if data.format is None:
        return Dataset(data.path, DatasetInfo.load(data.path))
    assert seq_len is not None
    return Dataset(data.path, describe_foreign(data.path, data.format, seq_len), data.format)


def open_tokenizer(data: DataConfig, copy: Path | None = None) -> Tokenizer:
    """Loads the tokenizer of a run's dataset, with the dataset's end-of-text id.

    Args:
        data: the run's `data` section.
        copy: directory with a copy of the tokenizer's files, such as a checkpoint.

    Raises:
        DataError: the tokenizer is missing or corrupt.
    """
    tokenizer = load_tokenizer(copy or (data.format.tokenizer if data.format else data.path))
    if data.format is not None and data.format.end_of_text is not None:
        tokenizer.end_of_text = data.format.end_of_text
    return tokenizer


def save_tokenizer(data: DataConfig, folder: Path) -> None:
    """Copies the tokenizer of a run's dataset to `folder`."""
    if data.format is not None:
        load_tokenizer(data.format.tokenizer).save(folder)
        return
    for name in TOKENIZER_FILES:
        shutil.copyfile(data.path / name, folder / name)


def tokenizer_bytes(data: DataConfig) -> int:
    """Approximate number of bytes that `save_tokenizer` writes."""
    if data.format is not None:
        return LARGE_TOKENIZER
    return sum((data.path / name).stat().st_size for name in TOKENIZER_FILES)
