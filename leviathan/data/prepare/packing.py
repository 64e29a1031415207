"""Packs the tokenized documents of a split into MDS shards.

The index of the stream has the position of every document in its tokenized file and in the stream.
The document tables are read in slices, and only the positions of slices are kept (56 bytes per
65,536 documents), so that neither large files nor many documents need memory. With the index, any
range of the stream can be read directly, so that any worker can write any shard independently.

Shards have a fixed number of samples, so that their content follows from the index only; the
number of workers and interruptions do not change it. A worker needs memory for about two shards.

Duplicate texts are found in bounded memory: digests are partitioned into files by their leading
bits, about a million per file, and sorted file by file, with about 100 MB of memory for up to half
a billion documents and 25 bytes per document of temporary disk space.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from leviathan.data.format import SplitInfo, SubsetSize, token_dtype
from leviathan.data.mds import (
    ShardSamples,
    read_shard,
    samples_per_shard,
    shard_entry,
    shard_name,
    write_index,
    write_shard,
)
from leviathan.data.prepare.executors import Pool
from leviathan.data.prepare.tokenize import DOCUMENT_DTYPE, TRAIN
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import DataError

SLICE_DOCUMENTS = 1 << 16

_SLICE = np.dtype(
    [
        ("part", "<i8"),
        ("copy", "<i8"),  # number of the pass over the corpus
        ("first", "<i8"),  # first document, within the tokenized file
        ("count", "<i8"),
        ("offset", "<i8"),  # position of `first` in the ids of the tokenized file
        ("begin", "<i8"),  # position in the stream of the slice's selected documents …
        ("document", "<i8"),  # … and the number of the first of them
    ]
)


class Ids(Protocol):
    """The ids of a tokenized file, document after document."""

    def read(self, begin: int, end: int) -> np.ndarray:
        """Ids `begin … end - 1`."""
        ...


@dataclass(frozen=True)
class IdFile:
    """Ids in an uncompressed file, as `tokenize` writes them."""

    path: Path
    dtype: str

    def read(self, begin: int, end: int) -> np.ndarray:
        """Ids `begin … end - 1`."""
        return np.fromfile(self.path, self.dtype, end - begin, offset=begin * self.itemsize)

    @property
    def itemsize(self) -> int:
        """Bytes of one id."""
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Kept:
    """One byte per document of all tokenized files from `first` on; 0 for duplicates."""

    path: Path
    first: int


@dataclass(frozen=True)
class TokenizedFile:
    """One tokenized corpus file.

    Attributes:
        table: path of its DOCUMENT_DTYPE records.
        subset_of: uint16, the dataset's subset number of each of its subsets.
        keep: marks of documents that are not duplicates; None: all.
        only: the only subset to select; None: all.
    """

    table: Path
    ids: Ids
    subset_of: np.ndarray
    keep: Kept | None = None
    only: int | None = None

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.table.stat().st_size // DOCUMENT_DTYPE.itemsize

    def read(self, first: int, count: int) -> np.ndarray:
        """Returns some of its records."""
        return read_table(self.table, first, count)


def read_table(path: Path, first: int, count: int) -> np.ndarray:
    """Records `first … first + count - 1` of a table of documents."""
    return np.fromfile(path, DOCUMENT_DTYPE, count, offset=first * DOCUMENT_DTYPE.itemsize)


@dataclass(frozen=True)
class Selection:
    """Selection of the documents of a stream, and their number of epochs.

    Attributes:
        split: TRAIN or VAL.
        epochs: float64 [subsets], epochs of each subset; None: one. For 2.5, the documents whose
            hash is below one half are taken a third time.
    """

    split: int
    epochs: np.ndarray | None = None

    @property
    def passes(self) -> int:
        """Number of passes over the corpus; a pass takes a document at most once."""
        return 1 if self.epochs is None else math.ceil(self.epochs.max(initial=0))

    def mask_of(self, part: TokenizedFile, first: int, table: np.ndarray, copy: int) -> np.ndarray:
        """Which documents of `table` are taken in pass `copy`; bool [documents]."""
        mask = table["split"] == self.split
        if part.keep is not None:
            start = part.keep.first + first
            mask &= np.fromfile(part.keep.path, np.bool_, len(table), offset=start)
        if part.only is not None:
            mask &= table["subset"] == part.only
        if self.epochs is not None:
            # The half of the digest that does not decide on validation.
            left = self.epochs[part.subset_of[table["subset"]]] - copy
            mask &= (left >= 1) | (table["digest"][:, 1] * 2.0**-64 < left)
        return mask


@dataclass(frozen=True)
class StreamIndex:
    """Index of a split's stream.

    Attributes:
        slices: in the order of the stream.
        subset_documents: int64 [subsets].
        subset_ids: int64 [subsets].
    """

    choice: Selection
    parts: Sequence[TokenizedFile]
    slices: np.ndarray
    bytes_of_text: int
    subset_documents: np.ndarray
    subset_ids: np.ndarray

    @property
    def ids(self) -> int:
        """Length of the stream."""
        return int(self.subset_ids.sum())

    @property
    def documents(self) -> int:
        """Number of documents, with copies."""
        return int(self.subset_documents.sum())

    def between(self, begin: int, end: int) -> "StreamRange":
        """The parts of the index needed to read the stream from `begin` to `end`."""
        begins = self.slices["begin"]
        first = int(np.searchsorted(begins, begin, side="right")) - 1
        slices = self.slices[first : int(np.searchsorted(begins, end, side="left"))]
        parts = {number: self.parts[number] for number in np.unique(slices["part"]).tolist()}
        return StreamRange(self.choice, parts, slices, begin, end)


def index_stream(
    parts: Sequence[TokenizedFile],
    choice: Selection,
    subsets: int,
    on_documents: Callable[[int], Any] = lambda _: None,
) -> StreamIndex:
    """Computes the position of every selected document.

    Args:
        parts: in order.
        choice: the selection.
        subsets: their number.
        on_documents: called with the number of documents read.
    """
    found: list[list[tuple[int, ...]]] = [[] for _ in range(choice.passes)]
    documents, ids = np.zeros(subsets, np.int64), np.zeros(subsets, np.int64)
    text = 0
    for number, part in enumerate(parts):
        offset, total = 0, part.documents
        for first in range(0, total, SLICE_DOCUMENTS):
            table = part.read(first, SLICE_DOCUMENTS)
            for copy, slices in enumerate(found):
                mask = choice.mask_of(part, first, table, copy)
                here = table[mask]
                if not len(here):
                    continue
                length = int(here["length"].sum())
                slices.append((number, copy, first, len(table), offset, length, len(here)))
                of = part.subset_of[here["subset"]]
                documents += np.bincount(of, minlength=subsets)
                # Sums of float64 are exact up to 2^53 ids.
                ids += np.bincount(of, here["length"], subsets).astype(np.int64)
                text += int(here["bytes"].sum())
            offset += int(table["length"].sum())
            on_documents(len(table))
    slices = np.array([row for rows in found for row in rows], _SLICE)
    for name in ("begin", "document"):  # so far counts; from now on cumulative
        slices[name] = np.cumsum(slices[name]) - slices[name]
    return StreamIndex(choice, parts, slices, text, documents, ids)


@dataclass(frozen=True)
class StreamRange:
    """A range of a stream, readable in any process.

    Attributes:
        parts: the tokenized files needed, by number.
        slices: slices that overlap with the range.
    """

    choice: Selection
    parts: dict[int, TokenizedFile]
    slices: np.ndarray
    begin: int
    end: int

    def read(self) -> "Documents":
        """Reads the ids and documents of the range; needs memory for them and one table."""
        pieces: list[np.ndarray] = []
        ends: list[np.ndarray] = []
        subsets: list[np.ndarray] = []
        number = -1
        for entry in self.slices:
            part, first = self.parts[int(entry["part"])], int(entry["first"])
            table = part.read(first, int(entry["count"]))
            mask = self.choice.mask_of(part, first, table, int(entry["copy"]))
            file_ends = entry["offset"] + np.cumsum(table["length"])
            chosen = np.flatnonzero(mask)
            stream_ends = entry["begin"] + np.cumsum(table["length"][chosen])
            low = int(np.searchsorted(stream_ends, self.begin, side="right"))
            high = int(np.searchsorted(stream_ends, self.end, side="left")) + 1
            chosen, stream_ends = chosen[low:high], stream_ends[low:high]
            if not len(chosen):
                continue
            stop = file_ends[chosen]
            start = stop - table["length"][chosen]
            start[0] += max(0, self.begin - int(stream_ends[0] - table["length"][chosen[0]]))
            stop[-1] -= max(0, int(stream_ends[-1]) - self.end)
            pieces += [part.ids.read(*span) for span in _spans(start, stop)]
            ends.append(stream_ends - self.begin)
            subsets.append(part.subset_of[table["subset"][chosen]])
            number = int(entry["document"]) + low if number < 0 else number
        return Documents(
            pieces[0] if len(pieces) == 1 else np.concatenate(pieces),
            np.concatenate(ends),
            np.concatenate(subsets),
            number,
        )


@dataclass(frozen=True)
class Documents:
    """The documents in a range of a stream; the first and the last may be partial.

    Attributes:
        ids: [n].
        ends: int64 [documents], one past each document's last id, relative to the beginning of the
            range.
        subsets: uint16 [documents].
        first: number of the first document.
    """

    ids: np.ndarray
    ends: np.ndarray
    subsets: np.ndarray
    first: int


def _spans(start: np.ndarray, stop: np.ndarray) -> list[tuple[int, int]]:
    """Concatenates adjacent documents."""
    breaks = np.flatnonzero(start[1:] != stop[:-1])
    firsts = start[np.concatenate([[0], breaks + 1])]
    lasts = stop[np.concatenate([breaks, [len(stop) - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


_BUCKET_DOCUMENTS = 1 << 20
_MOST_BUCKETS = 512  # maximum number of open files

_RECORD = np.dtype([("digest", "<u8", (2,)), ("document", "<i8"), ("is_training", "u1")])


def deduplicate(parts: Sequence[TokenizedFile], folder: Path) -> tuple[list[TokenizedFile], int]:
    """Marks the documents to keep so that each text occurs once.

    A text of the validation split is dropped from training; otherwise the first one stays.

    Args:
        parts: in order.
        folder: directory of the file `keep` with the marks, one byte per document.

    Returns:
        The parts with their marks, and the number of dropped documents.
    """
    totals = [part.documents for part in parts]
    firsts = np.cumsum(totals) - totals
    documents = int(sum(totals))
    keep = folder / "keep"
    with keep.open("wb") as file:
        for begin in range(0, documents, 1 << 20):
            file.write(b"\x01" * min(1 << 20, documents - begin))
    bits = min(_MOST_BUCKETS, max(1, documents // _BUCKET_DOCUMENTS)).bit_length() - 1
    buckets = folder / "buckets"
    shutil.rmtree(buckets, ignore_errors=True)
    buckets.mkdir()
    _distribute(parts, firsts, buckets, bits)
    marks = np.memmap(keep, np.bool_, mode="r+") if documents else np.ones(0, np.bool_)
    dropped = 0
    for path in buckets.iterdir():
        repeated = _repeated(np.fromfile(path, _RECORD))
        marks[repeated] = False
        dropped += len(repeated)
    if isinstance(marks, np.memmap):
        marks.flush()
    shutil.rmtree(buckets)
    return [
        replace(part, keep=Kept(keep, first))
        for part, first in zip(parts, firsts.tolist(), strict=True)
    ], dropped


def _distribute(
    parts: Sequence[TokenizedFile], firsts: np.ndarray, buckets: Path, bits: int
) -> None:
    """Writes the record of each document to the file of its digest's leading `bits`."""
    with ExitStack() as stack:
        files = [
            stack.enter_context((buckets / f"{number:03}").open("wb"))
            for number in range(1 << bits)
        ]
        for part, start in zip(parts, firsts.tolist(), strict=True):
            for first in range(0, part.documents, SLICE_DOCUMENTS):
                table = part.read(first, SLICE_DOCUMENTS)
                records = np.zeros(len(table), _RECORD)
                records["digest"] = table["digest"]
                records["document"] = start + first + np.arange(len(table))
                records["is_training"] = table["split"] == TRAIN
                # In two steps, because a shift by 64 bits is undefined.
                bucket = table["digest"][:, 1] >> np.uint64(32) >> np.uint64(32 - bits)
                order = np.argsort(bucket, kind="stable")
                ends = np.cumsum(np.bincount(bucket.astype(np.int64), minlength=len(files)))
                for file, piece in zip(files, np.split(records[order], ends[:-1]), strict=True):
                    file.write(piece.tobytes())


def _repeated(records: np.ndarray) -> np.ndarray:
    """Numbers of the documents that repeat an earlier or a validation document."""
    digest = records["digest"]
    keys = (records["document"], records["is_training"], digest[:, 1], digest[:, 0])
    ordered = records[np.lexsort(keys)]
    equal = (ordered["digest"][1:] == ordered["digest"][:-1]).all(axis=1)
    return ordered["document"][1:][equal]


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
    """A written shard: its `index.json` entry, and occurrences of each id, int64 [vocab_size]."""

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
