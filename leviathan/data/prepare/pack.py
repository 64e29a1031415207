"""Packs the stream of a split into MDS shards; each shard is written independently by any worker.

Shards have a fixed number of samples, so that their content follows from the stream index alone;
the number of workers and interruptions do not change it. A worker needs memory for about two
shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.data.format import SplitInfo, SubsetSize, token_dtype
from leviathan.data.mds import read_shard
from leviathan.data.mds_write import (
    ShardSamples,
    samples_per_shard,
    shard_entry,
    shard_name,
    write_index,
    write_shard,
)
from leviathan.data.prepare.pool import Pool
from leviathan.data.prepare.stream_index import StreamIndex, StreamRange
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import DataError

_COUNTED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class ShardTask:
    """Input of one worker to write one shard.

    Attributes:
        last: whether the shard ends the stream; otherwise its last id is the first of the next
            shard.
    """

    path: Path
    stretch: StreamRange
    rows: int
    seq_len: int
    vocab_size: int
    padding: int
    last: bool


@dataclass(frozen=True)
class Packed:
    """A written shard: its entry for `index.json`, and occurrences of each id, int64
    [vocab_size]."""

    entry: dict[str, Any]
    counts: np.ndarray


def pack(
    layout: StreamIndex,
    tokenizer: Tokenizer,
    subsets: list[str],
    seq_len: int,
    out: Path,
    pool: Pool,
    advance: Callable[[float], Any],
) -> tuple[SplitInfo, np.ndarray]:
    """Writes the samples of a split to `out`, and resumes after an interruption.

    Returns:
        The split's size, and the occurrences of each id in its stream, int64 [vocab_size].
    """
    out.mkdir(exist_ok=True)
    for leftover in out.glob(".*.tmp"):
        leftover.unlink()
    tasks = shard_tasks(layout, tokenizer, seq_len, out)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    entries: dict[int, dict[str, Any]] = {}

    def finish(number: int, packed: Packed) -> None:
        nonlocal counts
        entries[number] = packed.entry
        counts += packed.counts

    pool.run(pack_shard, dict(enumerate(tasks)), advance, finish)
    write_index(out, [entries[number] for number in range(len(tasks))])
    assert int(counts.sum()) == layout.ids
    targets = max(0, layout.ids - 1)
    rows = sum(task.rows for task in tasks)
    sizes = zip(subsets, layout.subset_documents.tolist(), layout.subset_ids.tolist(), strict=True)
    info = SplitInfo(
        rows=rows,
        ids=layout.ids,
        tokens=targets,
        padded=rows * seq_len - targets,
        documents=layout.documents,
        bytes_of_text=layout.bytes_of_text,
        subsets={
            name: SubsetSize(documents=documents, ids=ids)
            for name, documents, ids in sizes
            if documents
        },
    )
    return info, counts


def shard_tasks(
    layout: StreamIndex, tokenizer: Tokenizer, seq_len: int, out: Path
) -> list[ShardTask]:
    """The packing tasks of a split, in order."""
    rows = -(-(layout.ids - 1) // seq_len)
    each = samples_per_shard(seq_len, token_dtype(tokenizer.vocab_size))
    tasks: list[ShardTask] = []
    for number, first in enumerate(range(0, rows, each)):
        stop = min(first + each, rows)
        end = min(stop * seq_len + 1, layout.ids)
        tasks.append(
            ShardTask(
                path=out / shard_name(number),
                stretch=layout.between(first * seq_len, end),
                rows=stop - first,
                seq_len=seq_len,
                vocab_size=tokenizer.vocab_size,
                padding=tokenizer.end_of_text,
                last=stop == rows,
            )
        )
    return tasks


def pack_shard(task: ShardTask, on_ids: Callable[[int], Any]) -> Packed:
    """Writes one shard; one of an earlier run is only read."""
    packed = _read_again(task) if task.path.exists() else None
    if packed is None:
        rows, ids = _cut(task)
        counts = count_ids(ids if task.last else ids[:-1], task.vocab_size)
        packed = Packed(write_shard(task.path, rows), counts)
    on_ids(task.stretch.end - task.stretch.begin - (not task.last))
    return packed


def _read_again(task: ShardTask) -> Packed | None:
    """Result of `pack_shard` for an existing shard; None if it is incomplete."""
    dtype = token_dtype(task.vocab_size)
    ids = task.stretch.end - task.stretch.begin
    try:
        content = read_shard(task.path, task.seq_len, dtype)
    except DataError:
        return None
    if (len(content.n_valid), (content.n_valid - 1).sum() + 1) != (task.rows, ids):
        return None
    counts = count_ids(content.tokens[:, :-1].reshape(-1)[:ids], task.vocab_size)
    if task.last and ids > task.rows * task.seq_len:
        counts[content.tokens[-1, -1]] += 1
    return Packed(shard_entry(task.path, task.rows, content.sha256, task.seq_len, dtype), counts)


def count_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Occurrences of each id; int64 [vocab_size]. Counts a million ids at a time."""
    counts = np.zeros(vocab_size, np.int64)
    for begin in range(0, len(ids), _COUNTED_AT_ONCE):
        counts += np.bincount(ids[begin : begin + _COUNTED_AT_ONCE], minlength=vocab_size)
    return counts


def _cut(task: ShardTask) -> tuple[ShardSamples, np.ndarray]:
    """The samples of a shard, and its ids without padding."""
    found = task.stretch.read()
    starts = np.arange(task.rows) * task.seq_len
    n_valid = np.minimum(task.seq_len + 1, len(found.ids) - starts)
    missing = task.rows * task.seq_len + 1 - len(found.ids)
    ids = found.ids
    if missing:
        ids = np.concatenate([ids, np.full(missing, task.padding, ids.dtype)])
    # A document belongs to every sample that contains one of its ids.
    first = np.searchsorted(found.ends, starts, side="right")
    last = np.searchsorted(found.ends, starts + n_valid - 1, side="right")
    documents = last - first + 1
    place = np.repeat(first - (np.cumsum(documents) - documents), documents)
    rows = ShardSamples(
        ids=ids,
        n_valid=n_valid,
        first_document=found.first + first,
        subsets=found.subsets[place + np.arange(len(place))],
        documents=documents,
    )
    return rows, found.ids
