"""Reads MDS datasets of other converters: one column of token ids, no `dataset.json`.

Their samples do not overlap, and document boundaries are not recorded. Samples of `seq_len + 1`
ids are used like ours; in samples of `seq_len` ids, the last id has no target.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from leviathan.config.schema import MdsTokensFormat
from leviathan.data.foreign_shards import ForeignShards, ShardEntry
from leviathan.data.format import FORMAT_VERSION, DatasetInfo, SplitInfo, TokenizerInfo, token_dtype
from leviathan.data.mds import Sample, ShardFile, ShardReader
from leviathan.data.tokenizer import load_tokenizer
from leviathan.errors import DataError

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
    """Builds the dataset description. The numbers of documents and bytes of text are unknown,
    recorded as 0.

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
    """Split → directory: `path` itself is the training split, or it contains train and optionally
    val.

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
