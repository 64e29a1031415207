"""Parts, in order → the rows of one split, as MDS shards.

Everything here works on blocks of a few million ids; nothing is done per id in Python.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.data.format import SplitInfo, token_dtype
from leviathan.data.mds import columns
from leviathan.data.prepare.tokenise import DOCUMENT_DTYPE, TRAIN
from leviathan.data.tokenizer import Tokenizer

SHARD_BYTES = 1 << 26
_BLOCK_IDS = 1 << 22

_Row = dict[str, Any]  # MDS column → value


@dataclass(frozen=True)
class Part:
    """One tokenised corpus file and which of its documents are wanted.

    Attributes:
        subset_of: uint16, the data set's subset number for each of the part's own.
        keep: bool [documents], False for a duplicate; None keeps all.
    """

    folder: Path
    subset_of: np.ndarray
    keep: np.ndarray | None = None

    def documents(self) -> np.ndarray:
        """The part's table of documents."""
        return np.fromfile(self.folder / "documents", DOCUMENT_DTYPE)

    def wanted(self, split: int) -> np.ndarray:
        """Which of its documents go into `split`, bool [documents]."""
        wanted = self.documents()["split"] == split
        return wanted if self.keep is None else wanted & self.keep


@dataclass(frozen=True)
class _Block:
    ids: np.ndarray  # [n]
    lengths: np.ndarray  # int64 [documents]
    subsets: np.ndarray  # uint16 [documents]
    bytes: int


def pack(
    parts: Sequence[Part],
    split: int,
    tokenizer: Tokenizer,
    seq_len: int,
    out: Path,
    on_ids: Callable[[int], Any],
) -> tuple[SplitInfo, np.ndarray]:
    """Writes the rows of `split` to `out` and counts its ids.

    Returns:
        The split's size, and int64 [vocab_size] occurrences of each id in its stream.
    """
    from streaming import MDSWriter  # 12 s: only where there is something to write

    dtype = token_dtype(tokenizer.vocab_size)
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    rows = _RowMaker(seq_len, dtype, tokenizer.end_of_text)
    documents = text_bytes = 0
    writer = MDSWriter(
        out=str(out), columns=columns(seq_len, dtype), hashes=["sha256"], size_limit=SHARD_BYTES
    )
    for block in _blocks(parts, split, dtype):
        counts += np.bincount(block.ids, minlength=len(counts))
        documents += len(block.lengths)
        text_bytes += block.bytes
        for row in rows.add(block):
            writer.write(row)
        on_ids(len(block.ids))
    for row in rows.finish():
        writer.write(row)
    writer.finish()
    ids = int(counts.sum())
    targets = max(0, ids - 1)
    info = SplitInfo(
        rows=rows.count,
        ids=ids,
        tokens=targets,
        padded=rows.count * seq_len - targets,
        documents=documents,
        bytes_of_text=text_bytes,
    )
    return info, counts


def _blocks(parts: Sequence[Part], split: int, dtype: str) -> Iterator[_Block]:
    """The split's documents in order, whole documents, a few million ids at a time."""
    for part in parts:
        table = part.documents()
        if not len(table):
            continue
        ids = np.memmap(part.folder / "ids", np.dtype(dtype), mode="r")
        ends = np.cumsum(table["length"])
        wanted = part.wanted(split)
        first = 0
        while first < len(table):
            begin = ends[first] - table["length"][first]
            last = max(first + 1, int(np.searchsorted(ends, begin + _BLOCK_IDS, side="right")))
            here, mask = table[first:last], wanted[first:last]
            if mask.any():
                chosen = ids[begin : ends[last - 1]]
                if not mask.all():
                    chosen = chosen[np.repeat(mask, here["length"])]
                here = here[mask]
                subsets = part.subset_of[here["subset"]]
                yield _Block(chosen, here["length"], subsets, int(here["bytes"].sum()))
            first = last


class _RowMaker:
    """Cuts the stream into rows of `seq_len + 1` ids that overlap by one."""

    def __init__(self, seq_len: int, dtype: str, padding: int) -> None:
        self.seq_len, self.dtype, self.padding = seq_len, dtype, padding
        self.count = 0
        self._ids = np.zeros(0, dtype)  # the stream's rest: at most seq_len ids
        self._documents = np.zeros(0, np.int64)  # running document number of each of them
        self._subsets = np.zeros(0, np.uint16)  # of the documents from _first on
        self._first = 0

    def add(self, block: _Block) -> Iterator[_Row]:
        """The rows that are complete once `block` has been appended to the stream."""
        next_document = self._first + len(self._subsets)
        numbers = np.arange(next_document, next_document + len(block.lengths))
        self._documents = np.concatenate([self._documents, np.repeat(numbers, block.lengths)])
        self._ids = np.concatenate([self._ids, block.ids])
        self._subsets = np.concatenate([self._subsets, block.subsets])
        # A row needs seq_len + 1 ids and uses up seq_len of them.
        rows = (len(self._ids) - 1) // self.seq_len
        for start in range(0, rows * self.seq_len, self.seq_len):
            yield self._row(start, self.seq_len + 1)
        used = rows * self.seq_len
        self._ids, self._documents = self._ids[used:], self._documents[used:]
        self._subsets = self._subsets[self._documents[0] - self._first :]
        self._first = int(self._documents[0])

    def finish(self) -> Iterator[_Row]:
        """The last row, padded, if any target is left."""
        if len(self._ids) > 1:
            yield self._row(0, len(self._ids))

    def _row(self, start: int, n_valid: int) -> _Row:
        first = int(self._documents[start])
        last = int(self._documents[start + n_valid - 1])
        tokens = self._ids[start : start + n_valid]
        if n_valid <= self.seq_len:
            padding = np.full(self.seq_len + 1 - n_valid, self.padding, self.dtype)
            tokens = np.concatenate([tokens, padding])
        self.count += 1
        subsets = self._subsets[first - self._first : last + 1 - self._first]
        return {
            "tokens": tokens,
            "n_valid": n_valid,
            "first_document": first,
            "subsets": subsets,
        }


def duplicates(tables: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Which documents to keep so that each text stays once.

    A text of the validation split is dropped from training; otherwise the first one stays.

    Args:
        tables: each part's table of documents, in order.

    Returns:
        bool [documents] for each table.
    """
    digests = np.concatenate([table["digest"] for table in tables])
    is_training = np.concatenate([table["split"] for table in tables]) == TRAIN
    order = np.lexsort((np.arange(len(digests)), is_training, digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    repeated = np.zeros(len(digests), bool)
    repeated[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    keep = np.empty(len(digests), bool)
    keep[order] = ~repeated
    return np.split(keep, np.cumsum([len(table) for table in tables])[:-1])
