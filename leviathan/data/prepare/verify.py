"""`leviathan data verify`: reads every byte of a dataset and recounts its contents."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.console import progress_bar, say
from leviathan.data.format import COUNTS_FILE, DATASET_FILE, REJECTS_FILE, DatasetInfo, SplitInfo
from leviathan.data.mds import ShardContent, open_split, read_index, read_shard
from leviathan.data.prepare.build import fingerprint
from leviathan.data.prepare.executors import Pool, open_local_pool
from leviathan.data.prepare.packing import count_ids
from leviathan.data.prepare.workdir import OWN_FILES
from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.errors import DataError

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class ShardCheck:
    """One shard to verify, with its entry."""

    path: Path
    number: int
    first_row: int
    rows: int
    sha256: str
    seq_len: int
    dtype: str
    vocab_size: int
    end_of_text: int
    subsets: int
    last: bool


@dataclass(frozen=True)
class ShardFacts:
    """Statistics of a verified shard.

    Attributes:
        counts: int64 [vocab_size], of its samples' ids, without the id that every sample except the
            stream's first shares with the previous one.
        subset_documents: int64 [subsets], documents that end in the shard.
        subset_ids: int64 [subsets], as `counts`.
        first_id: the first sample's first id, in document `first_document`.
        last_id: the last sample's last id; `next_document` is the document that follows.
    """

    counts: np.ndarray
    subset_documents: np.ndarray
    subset_ids: np.ndarray
    first_id: int
    first_document: int
    last_id: int
    next_document: int


def verify(directory: Path, workers: int = 1) -> dict[str, Any]:
    """Hashes every shard and counts every sample, document and id of a dataset.

    Returns:
        `DatasetInfo.summary()` with `"verified": True`.

    Raises:
        DataError: a file is corrupt; the message names it.
    """
    info = DatasetInfo.load(directory)
    tokenizer = load_tokenizer(directory)
    _check_tokenizer(directory, info, tokenizer)
    lengths = np.zeros(info.vocab_size, np.int64)  # bytes of each id; end-of-text has none
    lengths[list(tokenizer.ranks.values())] = [len(token) for token in tokenizer.ranks]
    total = sum(split.rows for split in info.splits.values())
    with progress_bar("verifying (rows)", total=total) as bar, open_local_pool(workers) as pool:
        for name in info.splits:
            counts = _verify_split(directory, info, name, lengths, pool, bar.advance)
            if name == "train":
                _verify_counts(directory / COUNTS_FILE, counts)
    found = fingerprint(directory, tokenizer.fingerprint, info.seq_len, info.subsets, info.splits)
    if found != info.fingerprint:
        raise DataError(
            "verify.fingerprint",
            f"{directory}: the fingerprint in dataset.json does not match its shards",
        )
    _verify_totals(directory, info)
    for path in _unknown(directory, info):
        say(
            f"warning: {path} is not part of the dataset and is ignored; it may be left over "
            "from an interrupted run",
            style="yellow",
        )
    return info.summary() | {"verified": True}


def _unknown(directory: Path, info: DatasetInfo) -> list[Path]:
    """Yields files in the dataset's directories that do not belong to it."""
    known = {directory / name for name in (*OWN_FILES, *info.splits)}
    found = list(directory.iterdir())
    for name in info.splits:
        known |= {directory / name / "index.json"}
        known |= {
            directory / name / shard.raw_data.basename for shard in read_index(directory / name)
        }
        found += (directory / name).iterdir()
    return sorted(set(found) - known)


def _check_tokenizer(directory: Path, info: DatasetInfo, tokenizer: Tokenizer) -> None:
    if tokenizer.fingerprint != info.tokenizer.fingerprint:
        raise DataError(
            "verify.tokenizer",
            f"{directory}: tokenizer.tiktoken is not the tokenizer of dataset.json (its "
            "fingerprint differs)",
        )
    if tokenizer.vocab_size != info.vocab_size:
        raise DataError(
            "verify.tokenizer",
            f"{directory / DATASET_FILE}: vocab_size is {info.vocab_size}, but the tokenizer "
            f"has {tokenizer.vocab_size} ids",
        )


def _verify_split(
    data: Path,
    info: DatasetInfo,
    name: str,
    lengths: np.ndarray,
    pool: Pool,
    on_rows: Callable[[float], Any],
) -> np.ndarray:
    rows = open_split(data, info, name)
    firsts = np.cumsum(rows.shard_rows) - rows.shard_rows
    checks = {
        number: ShardCheck(
            path=rows.directory / shard.raw_data.basename,
            number=number,
            first_row=int(firsts[number]),
            rows=shard.samples,
            sha256=shard.raw_data.hashes.sha256,
            seq_len=info.seq_len,
            dtype=info.dtype,
            vocab_size=info.vocab_size,
            end_of_text=info.tokenizer.end_of_text,
            subsets=len(info.subsets),
            last=number == len(rows.shards) - 1,
        )
        for number, shard in enumerate(rows.shards)
    }
    counts = np.zeros(info.vocab_size, np.int64)
    documents, ids = np.zeros((2, len(info.subsets)), np.int64)
    ends: dict[int, tuple[int, ...]] = {}

    def finish(number: int, facts: ShardFacts) -> None:
        nonlocal counts, documents, ids
        counts += facts.counts
        documents += facts.subset_documents
        ids += facts.subset_ids
        ends[number] = (
            facts.first_id,
            facts.first_document,
            facts.last_id,
            facts.next_document,
        )

    pool.run(check_shard, checks, on_rows, finish)
    before: tuple[int, ...] = (0, 0)
    for number, check in checks.items():
        first_id, first_document, last_id, next_document = ends[number]
        # The last id of a sample is the first of the next one.
        if number and (first_id, first_document) != before:
            raise DataError("verify.order", f"{check.path}: does not continue the previous shard")
        before = last_id, next_document
    _compare(data / name, info, info.split(name), counts, documents, ids, lengths)
    return counts


def check_shard(check: ShardCheck, on_rows: Callable[[float], Any]) -> ShardFacts:
    """Reads one shard and counts its contents.

    Raises:
        DataError: it differs from `index.json`, or its samples are inconsistent.
    """
    shard = read_shard(check.path, check.seq_len, check.dtype)
    if shard.sha256 != check.sha256:
        raise DataError("verify.hash", f"{check.path}: corrupt: its sha256 differs from index.json")
    if len(shard.n_valid) != check.rows:
        raise DataError(
            "verify.samples",
            f"{check.path}: contains {len(shard.n_valid)} samples, index.json states {check.rows}",
        )
    _check_rows(check, shard)
    counts = np.zeros(check.vocab_size, np.int64)
    documents, ids = np.zeros((2, check.subsets), np.int64)
    first_subset = np.cumsum(shard.documents) - shard.documents
    number = int(shard.first_document[0])  # document of the first id of the next sample
    for begin in range(0, check.rows, _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        tokens = shard.tokens[rows]
        # The document of each id, relative to the sample's first: incremented after an end-of-text.
        document = np.zeros(tokens.shape, np.int64)
        np.cumsum(tokens[:, :-1] == check.end_of_text, axis=1, out=document[:, 1:])
        last = document[np.arange(len(tokens)), shard.n_valid[rows] - 1]
        expected = number + np.cumsum(document[:, -1]) - document[:, -1]
        if (shard.documents[rows] != last + 1).any() or (
            shard.first_document[rows] != expected
        ).any():
            raise DataError(
                "verify.documents",
                f"{check.path}: first_document or subsets do not match the end-of-text ids",
            )
        is_new = np.arange(check.seq_len + 1) < shard.n_valid[rows, None]
        is_new[:, 0] = False
        is_new[0, 0] = check.number == begin == 0
        new, subset = tokens[is_new], shard.subsets[(first_subset[rows, None] + document)[is_new]]
        counts += count_ids(new, check.vocab_size)
        documents += np.bincount(subset[new == check.end_of_text], minlength=check.subsets)
        ids += np.bincount(subset, minlength=check.subsets)
        number = int(expected[-1] + document[-1, -1])
        on_rows(len(tokens))
    return ShardFacts(
        counts=counts,
        subset_documents=documents,
        subset_ids=ids,
        first_id=int(shard.tokens[0, 0]),
        first_document=int(shard.first_document[0]),
        last_id=int(shard.tokens[-1, shard.n_valid[-1] - 1]),
        next_document=number,
    )


def _check_rows(check: ShardCheck, shard: ShardContent) -> None:
    width = check.seq_len + 1
    may_be_short = check.rows - 1 if check.last else check.rows
    if (shard.n_valid[:may_be_short] != width).any() or not 1 < shard.n_valid[-1] <= width:
        raise DataError("verify.order", f"{check.path}: a sample before the last one is not full")
    beyond = np.flatnonzero((shard.tokens >= check.vocab_size).any(axis=1))
    if len(beyond) or shard.subsets.max() >= check.subsets:
        where = f"sample {check.first_row + beyond[0]}" if len(beyond) else "a sample"
        raise DataError(
            "verify.invalid_id",
            f"{check.path}: {where} contains an id beyond the vocabulary or the subsets",
        )
    broken = np.flatnonzero(shard.tokens[1:, 0] != shard.tokens[:-1, -1])
    if len(broken):
        number = check.first_row + int(broken[0]) + 1
        raise DataError(
            "verify.order", f"{check.path}: sample {number} does not continue sample {number - 1}"
        )


def _compare(
    folder: Path,
    info: DatasetInfo,
    split: SplitInfo,
    counts: np.ndarray,
    documents: np.ndarray,
    ids: np.ndarray,
    lengths: np.ndarray,
) -> None:
    """Compares the counts with `dataset.json`."""
    if (documents.sum(), counts.sum()) != (split.documents, split.ids):
        raise DataError(
            "verify.totals",
            f"{folder}: {documents.sum()} documents and {counts.sum()} ids, dataset.json states "
            f"{split.documents} and {split.ids}",
        )
    if (text_bytes := int(counts @ lengths)) != split.bytes_of_text:
        raise DataError(
            "verify.totals",
            f"{folder}: {text_bytes} bytes of text, dataset.json states {split.bytes_of_text}",
        )
    for number, name in enumerate(info.subsets):
        subset = split.subsets.get(name)
        expected = (subset.documents, subset.ids) if subset else (0, 0)
        if split.subsets and (documents[number], ids[number]) != expected:
            raise DataError(
                "verify.totals",
                f"{folder}: {documents[number]} documents and {ids[number]} ids of {name!r}, "
                f"dataset.json states {expected[0]} and {expected[1]}",
            )


def _verify_counts(path: Path, counts: np.ndarray) -> None:
    try:
        stored = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError("verify.token_counts", f"{path}: missing or corrupt ({error})") from None
    if not np.array_equal(stored, counts):
        raise DataError(
            "verify.token_counts",
            f"{path}: differs from the counts of the ids in the training split",
        )


def _verify_totals(directory: Path, info: DatasetInfo) -> None:
    """Checks that the sources in `dataset.json` add up, and that the rejects exist."""
    path, sources = directory / DATASET_FILE, info.sources
    for key in ("empty", "rejected"):
        summed = sum(getattr(source, key) for source in sources)
        if summed != getattr(info, key):
            raise DataError(
                "verify.totals",
                f"{path}: {key} is {getattr(info, key)}, but its sources state {summed}",
            )
    documents = sum(source.documents for source in sources)
    if not info.config.get("mixing") and documents != info.documents + info.duplicates:
        raise DataError(
            "verify.totals",
            f"{path}: {info.documents} documents and {info.duplicates} duplicates, but its "
            f"sources state {documents}",
        )
    if info.rejected:
        rejects = directory / REJECTS_FILE
        lines = rejects.read_bytes().count(b"\n") if rejects.is_file() else 0
        if lines != info.rejected:
            raise DataError(
                "verify.rejects", f"{rejects}: {lines} lines, dataset.json states {info.rejected}"
            )
