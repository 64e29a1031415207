"""Tokenizes one corpus file: writes its ids, a document table, and the rejected records.

The result depends only on the file, the tokenizer and the validation fraction, so that files can be
tokenized in any order, by any number of workers, and again.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from leviathan.console import say
from leviathan.data.encoders import Backend, Encoder, TiktokenEncoder, make_encoder
from leviathan.data.format import token_dtype
from leviathan.data.prepare.readers import TextFolder, read
from leviathan.data.prepare.records import (
    MISSING,
    Document,
    RecordSchema,
    RejectedRecord,
    place_text,
)
from leviathan.data.prepare.sources import Source, Split
from leviathan.data.tokenizer import META_FILE, Tokenizer, UnencodableText, load_tokenizer
from leviathan.errors import DataError
from leviathan.files import atomic_directory, write_atomic

TRAIN, VAL = 0, 1

# One record per document; `length` counts its end-of-text id, `digest` is of the text's UTF-8.
DOCUMENT_DTYPE = np.dtype(
    [
        ("length", "<i8"),
        ("bytes", "<i8"),
        ("digest", "<u8", (2,)),
        ("subset", "<u2"),
        ("split", "u1"),
    ]
)

_BATCH_CHARACTERS = 2_000_000  # bytes of text encoded at once
_BATCH_DOCUMENTS = 4096

# Text encoded again by tiktoken, for comparison: about 2 % of the time of a file.
_COMPARED_AT_FIRST = 1 << 12
_COMPARED_SHARE = 0.0015


@dataclass(frozen=True)
class TokenizeTask:
    """Input of one worker to tokenize one file.

    Attributes:
        include: subsets to keep, all if empty; `exclude`: subsets to omit.
        backend: the encoder; `auto` selects one.
        threads: threads for tiktoken; gigatoken is faster than the reader.
    """

    source: Source
    split: Split
    part: Path
    tokenizer: Path
    fraction: float
    quarantine: bool
    threads: int
    reading: RecordSchema = field(default_factory=RecordSchema)
    include: frozenset[str] = frozenset()
    exclude: frozenset[str] = frozenset()
    backend: str = "auto"

    def wants(self, subset: str) -> bool:
        """Whether documents of `subset` are kept."""
        return subset not in self.exclude and (not self.include or subset in self.include)


@dataclass(frozen=True)
class TokenizedFileInfo:
    """`part.json`: origin and statistics of a tokenized file.

    Attributes:
        path: the source's name.
        bytes: bytes as stored; bytes of text if the source cannot report them.
        excluded: documents omitted by their subset, by name.
        named: number of records with a subset name; None if written by an earlier version.
        unnamed: number of records without a value at `subset_key`.
        misnamed: number of records with an invalid value at `subset_key`.
        misnamed_example: the first of them.
        backend: the encoder used.
        mismatches: 1 if the ids of another backend differed from tiktoken's and were discarded.
    """

    path: str
    split: Split
    bytes: int
    stamp: str
    sha256: str
    documents: int
    empty: int
    rejected: int
    content: str
    subsets: list[str]
    excluded: dict[str, int] = field(default_factory=dict)
    named: int | None = None
    unnamed: int = 0
    misnamed: int = 0
    misnamed_example: str = ""
    backend: str = "tiktoken"
    mismatches: int = 0

    @classmethod
    def load(cls, part: Path) -> "TokenizedFileInfo":
        """Reads the description of a tokenized file."""
        return cls(**json.loads((part / "part.json").read_bytes()))

    def names_subsets(self, default: str) -> bool:
        """Whether a record has a subset name; `default` is the subset of records without one."""
        if self.named is None:  # written by an earlier version
            return bool({*self.subsets, *self.excluded} - {default})
        return self.named > 0


def tokenize(task: TokenizeTask, on_bytes: Callable[[int], Any]) -> TokenizedFileInfo:
    """Writes `task.part` (a directory with ids, documents, rejects.jsonl and part.json) atomically.

    Raises:
        DataError: the file is corrupt, or a record is rejected and `task.quarantine` is off.
    """
    tokenizer, encoder = load_encoder(task.tokenizer, task.backend)
    with atomic_directory(task.part) as directory:
        try:
            info = _Writer(task, directory, tokenizer, encoder).write(on_bytes)
        except _Mismatch as mismatch:
            say(f"warning: {task.source.name}: {mismatch}", style="yellow")
            on_bytes(-mismatch.bytes_read)
            again = _Writer(task, directory, tokenizer, TiktokenEncoder(tokenizer))
            info = replace(again.write(on_bytes), mismatches=1)
        write_atomic(directory / "part.json", json.dumps(asdict(info)).encode())
    return info


_encoders: dict[tuple[str, str], tuple[Tokenizer, Encoder]] = {}  # by fingerprint and backend


def load_encoder(folder: Path, backend: str) -> tuple[Tokenizer, Encoder]:
    """Loads the tokenizer saved in `folder` and its encoder, once per process and its forks."""
    key = (json.loads((folder / META_FILE).read_bytes())["fingerprint"], backend)
    if key not in _encoders:
        remember_encoder(load_tokenizer(folder), backend)
    return _encoders[key]


def remember_encoder(tokenizer: Tokenizer, backend: str) -> Backend:
    """Creates the encoder of `tokenizer`, for this process and those forked from it.

    Returns:
        The selected backend.

    Raises:
        DataError: the requested backend does not support this tokenizer.
    """
    encoder = make_encoder(tokenizer, backend)
    _encoders.clear()  # a process needs only one
    for name in {backend, encoder.backend}:
        _encoders[tokenizer.fingerprint, name] = tokenizer, encoder
    return encoder.backend


class _Mismatch(Exception):
    """The ids of a backend differ from tiktoken's for a document."""

    bytes_read = 0

    def __init__(self, item: Document, backend: str) -> None:
        super().__init__(
            f"the ids that {backend} gives for line {item.line} differ from those of tiktoken; "
            "the complete file is encoded by tiktoken instead. Please report the text"
        )


class _Writer:
    """Writes the ids, document table and statistics of one file to a directory."""

    def __init__(
        self, task: TokenizeTask, folder: Path, tokenizer: Tokenizer, encoder: Encoder
    ) -> None:
        self.task, self.folder = task, folder
        self.tokenizer, self.encoder = tokenizer, encoder
        self.sha256, self.content = hashlib.sha256(), blake2b(digest_size=16)
        self.subsets: dict[str, int] = {}
        self.documents = self.empty = self.rejected = self.bytes_read = 0
        self.excluded: dict[str, int] = {}
        self.records = self.unnamed = self.misnamed = 0
        self.misnamed_example = ""
        self._has_records = not isinstance(task.source, TextFolder)
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.array([tokenizer.end_of_text], np.uint32)
        self._may_compare, self._compared = float(_COMPARED_AT_FIRST), 0

    def write(self, on_bytes: Callable[[int], Any]) -> TokenizedFileInfo:
        """Reads the source to its end."""
        source = self.task.source
        size, stamp = source.size(), source.stamp()

        def count(amount: int) -> None:
            self.bytes_read += amount
            on_bytes(amount)

        items = read(source, count, self.sha256, self.task.reading)
        with (
            (self.folder / "ids").open("wb") as ids_file,
            (self.folder / "documents").open("wb") as table_file,
            (self.folder / "rejects.jsonl").open("w", encoding="utf-8") as rejects_file,
        ):
            for batch, rejected_records in self._batches(items):
                contents = [item.text.encode() for item in batch]
                encoded = self._encode(batch, contents, rejected_records)
                self._reject(rejected_records, rejects_file)
                if batch:
                    table = self._table(batch, contents, encoded)
                    self._compare(batch, encoded, table)
                    ids_file.write(self._join(encoded).data)
                    table_file.write(table.tobytes())
                    self.content.update(np.ascontiguousarray(table["digest"]).tobytes())
                    self.documents += len(batch)
        if source.stamp() != stamp:
            raise DataError(
                "source.changed",
                f"{source.name} was changed while it was read. Run the command again",
            )
        return TokenizedFileInfo(
            path=source.name,
            split=self.task.split,
            bytes=self.bytes_read if size is None else size,
            stamp=stamp,
            sha256=self.sha256.hexdigest(),
            documents=self.documents,
            empty=self.empty,
            rejected=self.rejected,
            content=self.content.hexdigest(),
            subsets=list(self.subsets),
            excluded=self.excluded,
            named=self.records - self.unnamed - self.misnamed,
            unnamed=self.unnamed,
            misnamed=self.misnamed,
            misnamed_example=self.misnamed_example,
            backend=self.encoder.backend,
        )

    def _batches(
        self, items: Iterable[Document | RejectedRecord]
    ) -> Iterator[tuple[list[Document], list[RejectedRecord]]]:
        """Groups the selected documents; counts empty and excluded ones."""
        batch: list[Document] = []
        bad: list[RejectedRecord] = []
        characters = 0
        for item in items:
            if isinstance(item, RejectedRecord):
                bad.append(item)
            elif self._is_wanted(item):
                batch.append(item)
                characters += len(item.text)
            if characters >= _BATCH_CHARACTERS or len(batch) + len(bad) >= _BATCH_DOCUMENTS:
                yield batch, bad
                batch, bad, characters = [], [], 0
        yield batch, bad

    def _is_wanted(self, item: Document) -> bool:
        """Whether a document is selected; updates the counts."""
        self.records += self._has_records
        if item.no_subset == MISSING:
            self.unnamed += 1
        elif item.no_subset is not None:
            self.misnamed += 1
            if not self.misnamed_example:
                place = place_text(self.task.source, item.line, item.byte_offset)
                self.misnamed_example = f"{place}: {item.no_subset}"
        if not self.task.wants(item.subset):
            self.excluded[item.subset] = self.excluded.get(item.subset, 0) + 1
        elif not item.text:
            self.empty += 1
        else:
            return True
        return False

    def _encode(
        self, batch: list[Document], contents: list[bytes], bad: list[RejectedRecord]
    ) -> list[np.ndarray]:
        """Encodes the documents; one that cannot be encoded is moved from `batch` to `bad`."""
        if self.task.threads > 1 and self.encoder.backend == "tiktoken":
            with ThreadPoolExecutor(self.task.threads) as pool:
                found = list(pool.map(self._encode_one, batch, contents))
        else:
            found = list(map(self._encode_one, batch, contents))
        failed = [item for item in found if isinstance(item, RejectedRecord)]
        if failed:
            good = [n for n, ids in enumerate(found) if not isinstance(ids, RejectedRecord)]
            batch[:], contents[:] = [batch[n] for n in good], [contents[n] for n in good]
            bad.extend(failed)
        return [ids for ids in found if not isinstance(ids, RejectedRecord)]

    def _encode_one(self, item: Document, content: bytes) -> np.ndarray | RejectedRecord:
        try:
            return self.encoder.encode(item.text, content)
        except UnencodableText as error:
            return RejectedRecord(item.line, item.byte_offset, str(error))

    def _reject(self, rejected_records: list[RejectedRecord], file: TextIO) -> None:
        for bad in sorted(rejected_records, key=lambda bad: bad.line):
            if not self.task.quarantine:
                raise DataError(
                    "record.rejected",
                    f"{bad.message(self.task.source)}. Repair it, or set on_error=quarantine to "
                    "omit such documents",
                )
            file_name, line = self.task.source.place(bad.line)
            record = {
                "file": file_name,
                "line": line or 1,  # a text file is one document, which starts at its first line
                "byte_offset": bad.byte_offset or 0,  # rows have no offset
                "reason": bad.reason,
            }
            file.write(json.dumps(record) + "\n")
            self.rejected += 1

    def _table(
        self, batch: list[Document], contents: list[bytes], encoded: list[np.ndarray]
    ) -> np.ndarray:
        task, subsets = self.task, self.subsets
        table = np.zeros(len(batch), DOCUMENT_DTYPE)
        table["length"] = [len(ids) + 1 for ids in encoded]
        table["subset"] = [subsets.setdefault(item.subset, len(subsets)) for item in batch]
        if len(subsets) > np.iinfo(np.uint16).max:
            raise DataError(
                "prep.too_many_subsets", f"{task.source.name}: more than 65,535 different subsets"
            )
        table["bytes"] = [len(content) for content in contents]
        digests = b"".join([blake2b(content, digest_size=16).digest() for content in contents])
        table["digest"] = np.frombuffer(digests, "<u8").reshape(-1, 2)
        if task.split == "hash":
            # The fraction of 64-bit numbers below the threshold is the validation fraction, so that
            # a document never changes its split when files are added.
            threshold = np.uint64(int(task.fraction * 2.0**64))
            table["split"] = np.where(table["digest"][:, 0] < threshold, VAL, TRAIN)
        else:
            table["split"] = VAL if task.split == "val" else TRAIN
        return table

    def _compare(self, batch: list[Document], encoded: list[np.ndarray], table: np.ndarray) -> None:
        """Encodes the first document, and some selected by digest, again with tiktoken."""
        if self.encoder.backend == "tiktoken":
            return
        self._may_compare += _COMPARED_SHARE * int(table["bytes"].sum())
        order = list(np.argsort(table["digest"][:, 0], kind="stable")[:64])
        if not self._compared:
            order.insert(0, 0)
        for place in order:
            room = int(self._may_compare - self._compared)
            if room <= 0:
                return
            item, ids = batch[place], encoded[place]
            text = item.text
            if len(text) > room:  # of a long document, its beginning
                text = text[:room]
                ids = self.encoder.encode(text)
            self._compared += len(text)
            if not np.array_equal(ids, self.tokenizer.encode_array(text)):
                mismatch = _Mismatch(item, self.encoder.backend)
                mismatch.bytes_read = self.bytes_read
                raise mismatch

    def _join(self, encoded: list[np.ndarray]) -> np.ndarray:
        """Concatenates the ids, each document followed by end-of-text, in the dataset's dtype."""
        pieces = [piece for ids in encoded for piece in (ids, self._end)]
        joined = np.empty(sum(map(len, pieces)), self.dtype)
        return np.concatenate(pieces, out=joined, casting="same_kind")
