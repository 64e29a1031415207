"""Index of a split's stream: position of every document in its tokenized file and in the stream.

The document tables are read a slice at a time, and only the positions of slices are kept (56 bytes
per 65,536 documents), so that neither large files nor many documents need memory. With the index,
any range of the stream can be read directly, so that shards are written independently of each
other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from leviathan.data.prepare.tokenize import DOCUMENT_DTYPE

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
    """One byte per document in a file for all tokenized files, 0 for duplicates, from `first`
    on."""

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
        """Number of passes over the corpus; a pass takes a document at most once, so that copies
        are far apart."""
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
        """Reads the ids and documents of the range; needs memory for the ids and a slice's
        table."""
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
