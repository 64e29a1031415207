"""One corpus file → one part: its ids, a table of its documents, and what was wrong with it.

A part depends on its file, the tokenizer and the validation fraction alone, so files can be done
in any order, on any number of workers, again or not at all.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.data.files import write_atomic
from leviathan.data.format import token_dtype
from leviathan.data.prepare.reader import BadLine, Document, read
from leviathan.data.prepare.sources import Source, Split
from leviathan.data.tokenizer import Tokenizer, UnencodableText, load_tokenizer
from leviathan.errors import DataError

TRAIN, VAL = 0, 1

# One record a document; `length` counts its end-of-text id, `digest` is of the text's UTF-8.
DOCUMENT_DTYPE = np.dtype(
    [
        ("length", "<i8"),
        ("bytes", "<i8"),
        ("digest", "<u8", (2,)),
        ("subset", "<u2"),
        ("split", "u1"),
    ]
)

_BATCH_CHARACTERS = 2_000_000  # text held and encoded at once
_BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class Task:
    """What one worker needs to know to make one part."""

    source: Source
    split: Split
    part: Path
    tokenizer: Path
    fraction: float
    quarantine: bool
    threads: int


@dataclass(frozen=True)
class PartInfo:
    """`part.json`: what a finished part was made of and what it holds."""

    path: str  # the source's name
    split: Split
    bytes: int  # as stored
    stamp: str
    sha256: str
    documents: int
    empty: int
    rejected: int
    content: str
    subsets: list[str]

    @classmethod
    def load(cls, part: Path) -> "PartInfo":
        """Reads a part's description."""
        return cls(**json.loads((part / "part.json").read_bytes()))


def tokenise(task: Task, on_bytes: Callable[[int], Any]) -> PartInfo:
    """Makes `task.part` (a folder with ids, documents, rejects.jsonl and part.json), atomically.

    Raises:
        DataError: the file is damaged, or has a bad line and `task.quarantine` is off.
    """
    temporary = task.part.with_name(f"{task.part.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        info = _write_part(task, temporary, on_bytes)
        write_atomic(temporary / "part.json", json.dumps(asdict(info)).encode())
        temporary.rename(task.part)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return info


def _write_part(task: Task, folder: Path, on_bytes: Callable[[int], Any]) -> PartInfo:
    tokenizer = load_tokenizer(task.tokenizer)
    size, stamp = task.source.size(), task.source.stamp()
    digest, content = hashlib.sha256(), hashlib.blake2b(digest_size=16)
    subsets: dict[str, int] = {}
    documents = empty = rejected = 0
    with (
        (folder / "ids").open("wb") as ids_file,
        (folder / "documents").open("wb") as table_file,
        (folder / "rejects.jsonl").open("w", encoding="utf-8") as rejects_file,
    ):
        for batch, bad_lines, empty_here in _batches(read(task.source, on_bytes, digest)):
            encoded, unencodable = _encode(tokenizer, batch, task.threads)
            for bad in sorted(bad_lines + unencodable, key=lambda bad: bad.line):
                if not task.quarantine:
                    raise DataError(
                        f"{bad.message(task.source)}; repair it, or set on_error=quarantine to "
                        "leave such lines out"
                    )
                rejects_file.write(json.dumps(_reject(task.source, bad)) + "\n")
                rejected += 1
            empty += empty_here
            documents += len(batch)
            if batch:
                table = _table(batch, encoded, subsets, task)
                ids_file.write(_join(encoded, tokenizer).tobytes())
                table_file.write(table.tobytes())
                content.update(np.ascontiguousarray(table["digest"]).tobytes())
    return PartInfo(
        path=task.source.name,
        split=task.split,
        bytes=size or 0,
        stamp=stamp,
        sha256=digest.hexdigest(),
        documents=documents,
        empty=empty,
        rejected=rejected,
        content=content.hexdigest(),
        subsets=list(subsets),
    )


def _reject(source: Source, bad: BadLine) -> dict[str, Any]:
    return {
        "file": source.name,
        "line": bad.line,
        "byte_offset": bad.byte_offset,
        "reason": bad.reason,
    }


def _batches(
    items: Iterator[Document | BadLine],
) -> Iterator[tuple[list[Document], list[BadLine], int]]:
    """Groups a file's documents; empty texts are counted and left out."""
    batch: list[Document] = []
    bad: list[BadLine] = []
    empty = characters = 0
    for item in items:
        if isinstance(item, BadLine):
            bad.append(item)
        elif not item.text:
            empty += 1
        else:
            batch.append(item)
            characters += len(item.text)
        if characters >= _BATCH_CHARACTERS or len(batch) + len(bad) >= _BATCH_DOCUMENTS:
            yield batch, bad, empty
            batch, bad, empty, characters = [], [], 0, 0
    yield batch, bad, empty


def _encode(
    tokenizer: Tokenizer, batch: list[Document], threads: int
) -> tuple[list[np.ndarray], list[BadLine]]:
    """The ids of each document; a document that cannot be encoded leaves `batch`."""
    bad: list[BadLine] = []
    while True:
        try:
            return tokenizer.encode_batch([item.text for item in batch], threads), bad
        except UnencodableText as error:
            item = batch.pop(error.index)
            bad.append(BadLine(item.line, item.byte_offset, str(error)))


def _table(
    batch: list[Document], encoded: list[np.ndarray], subsets: dict[str, int], task: Task
) -> np.ndarray:
    table = np.zeros(len(batch), DOCUMENT_DTYPE)
    table["length"] = [len(ids) + 1 for ids in encoded]
    table["subset"] = [subsets.setdefault(item.subset, len(subsets)) for item in batch]
    if len(subsets) > np.iinfo(np.uint16).max:
        raise DataError(f"{task.source.name}: more than 65,535 different meta.pile_set_name")
    texts = [item.text.encode() for item in batch]
    table["bytes"] = [len(text) for text in texts]
    digests = b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in texts)
    table["digest"] = np.frombuffer(digests, "<u8").reshape(-1, 2)
    if task.split == "hash":
        # The share of the 64-bit numbers below the threshold is the fraction, whatever else is in
        # the corpus: a document never changes sides when files are added.
        threshold = np.uint64(int(task.fraction * 2.0**64))
        table["split"] = np.where(table["digest"][:, 0] < threshold, VAL, TRAIN)
    else:
        table["split"] = VAL if task.split == "val" else TRAIN
    return table


def _join(encoded: list[np.ndarray], tokenizer: Tokenizer) -> np.ndarray:
    """All ids in a row, each document followed by end-of-text, in the data set's dtype."""
    end = np.array([tokenizer.end_of_text], np.uint32)
    pieces = [piece for ids in encoded for piece in (ids, end)]
    return np.concatenate(pieces).astype(token_dtype(tokenizer.vocab_size))
