"""Finds duplicate texts among all tokenized files, in bounded memory.

Digests are first partitioned into files by their leading bits, about a million per file, and then
sorted file by file: about 100 MB of memory for up to half a billion documents, and 25 bytes per
document of temporary disk space.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from leviathan.data.prepare.stream_index import SLICE_DOCUMENTS, Kept, TokenizedFile
from leviathan.data.prepare.tokenize import TRAIN

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
    """Numbers of the documents that repeat an earlier one; validation documents count as
    earlier."""
    digest = records["digest"]
    keys = (records["document"], records["is_training"], digest[:, 1], digest[:, 0])
    ordered = records[np.lexsort(keys)]
    equal = (ordered["digest"][1:] == ordered["digest"][:-1]).all(axis=1)
    return ordered["document"][1:][equal]
