"""`leviathan data verify`: reads every byte of a data set and counts again."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.console import progress_bar
from leviathan.data.format import COUNTS_FILE, DATASET_FILE, DatasetInfo
from leviathan.data.mds import open_split
from leviathan.data.prepare.assemble import fingerprint
from leviathan.data.tokenizer import load_tokenizer
from leviathan.errors import DataError


def verify(directory: Path) -> dict[str, Any]:
    """Re-hashes every shard and re-counts every row, document and id of a data set.

    Returns:
        `DatasetInfo.summary()` with `"verified": True`.

    Raises:
        DataError: naming the file and what is wrong with it.
    """
    info = DatasetInfo.load(directory)
    tokenizer = load_tokenizer(directory)
    if tokenizer.fingerprint != info.tokenizer.fingerprint:
        raise DataError(
            f"{directory}: tokenizer.tiktoken is not the tokenizer of dataset.json (fingerprint)"
        )
    if tokenizer.vocab_size != info.vocab_size:
        raise DataError(
            f"{directory / DATASET_FILE}: vocab_size is {info.vocab_size}, the tokenizer has "
            f"{tokenizer.vocab_size} ids"
        )
    lengths = np.zeros(info.vocab_size, np.int64)  # bytes behind each id; end-of-text has none
    lengths[list(tokenizer.ranks.values())] = [len(token) for token in tokenizer.ranks]
    with progress_bar("verifying (rows)", total=sum(s.rows for s in info.splits.values())) as bar:
        for name, split in info.splits.items():
            counts = _verify_split(directory, info, name, bar.advance)
            text_bytes = int(counts @ lengths)
            if text_bytes != split.bytes_of_text:
                raise DataError(
                    f"{directory / name}: {text_bytes} bytes of text, dataset.json says "
                    f"{split.bytes_of_text}"
                )
            if name == "train":
                _verify_counts(directory / COUNTS_FILE, counts)
    found = fingerprint(directory, tokenizer.fingerprint, info.seq_len, info.subsets, info.splits)
    if found != info.fingerprint:
        raise DataError(f"{directory}: the fingerprint in dataset.json is not that of its shards")
    return info.summary() | {"verified": True}


def _verify_split(data: Path, info: DatasetInfo, name: str, on_rows: Any) -> np.ndarray:
    rows, split = open_split(data, info, name), info.split(name)
    directory = rows.directory
    counts = np.zeros(info.vocab_size, np.int64)
    documents, number, last = 0, 0, -1
    for shard in rows.shards:
        path = directory / shard.raw_data.basename
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != shard.raw_data.hashes.sha256:
            raise DataError(f"{path}: damaged: its sha256 is not the one in index.json")
        for _ in range(shard.samples):
            row = rows[number]
            ids = row.tokens[: row.n_valid]
            if ids.max() >= info.vocab_size or row.subsets.max() >= len(info.subsets):
                raise DataError(f"{path}: row {number} holds an id beyond the vocabulary")
            if number and ids[0] != last:
                raise DataError(f"{path}: row {number} does not continue row {number - 1}")
            new = ids if number == 0 else ids[1:]
            counts += np.bincount(new, minlength=info.vocab_size)
            documents = row.first_document + len(row.subsets)
            last, number = ids[-1], number + 1
        on_rows(shard.samples)
    if documents != split.documents or counts.sum() != split.ids:
        raise DataError(
            f"{directory}: {documents} documents and {counts.sum()} ids, dataset.json says "
            f"{split.documents} and {split.ids}"
        )
    return counts


def _verify_counts(path: Path, counts: np.ndarray) -> None:
    try:
        stored = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: missing or damaged ({error})") from None
    if not np.array_equal(stored, counts):
        raise DataError(f"{path}: not the counts of the ids in the training split")
