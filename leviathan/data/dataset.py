"""A dataset to train on: one that `leviathan prep` made, or a foreign one with its `format`."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from leviathan.config.schema import DataConfig, MdsTokensFormat
from leviathan.data.foreign_mds import ForeignShardReader, describe_foreign, split_dirs
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import ShardReader, open_split
from leviathan.data.remote import ShardCache
from leviathan.data.tokenizer import META_FILE, RANKS_FILE, Tokenizer, load_tokenizer

TOKENIZER_FILES = (RANKS_FILE, META_FILE)
LARGE_TOKENIZER = 4 << 20  # o200k_base's 200,000 ranks


@dataclass(frozen=True)
class Dataset:
    """Where the rows are and what they are."""

    path: Path
    info: DatasetInfo
    format: MdsTokensFormat | None = None
    cache: ShardCache | None = None  # of one that lies elsewhere

    def rows(self, split: str) -> ShardReader:
        """The rows of a split.

        Raises:
            DataError: the split does not exist, or it is damaged.
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
    """The dataset of a run, or the prepared one in a folder.

    Args:
        data: a run's `data` section, or a folder.
        seq_len: of the model; a foreign set does not say where its rows are to be cut.

    Raises:
        DataError: missing, damaged, out of reach, or not what `data.format` says.
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
    """The tokenizer of a run's dataset, with the end-of-text id that the dataset has.

    Args:
        data: the run's `data` section.
        copy: folder with a copy of its files, such as a checkpoint.

    Raises:
        DataError: the tokenizer is missing or corrupt.
    """
    tokenizer = load_tokenizer(copy or (data.format.tokenizer if data.format else data.path))
    if data.format is not None and data.format.end_of_text is not None:
        tokenizer.end_of_text = data.format.end_of_text
    return tokenizer


def save_tokenizer(data: DataConfig, folder: Path) -> None:
    """Leaves the tokenizer of a run's data in `folder`."""
    if data.format is not None:
        load_tokenizer(data.format.tokenizer).save(folder)
        return
    for name in TOKENIZER_FILES:
        shutil.copyfile(data.path / name, folder / name)


def tokenizer_bytes(data: DataConfig) -> int:
    """About how much `save_tokenizer` writes."""
    if data.format is not None:
        return LARGE_TOKENIZER
    return sum((data.path / name).stat().st_size for name in TOKENIZER_FILES)
