"""Estimates the disk space of a preparation before it starts."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from leviathan.console import say
from leviathan.data.format import token_dtype
from leviathan.data.prepare.reader import Document, read
from leviathan.data.prepare.source import Source
from leviathan.data.prepare.tokenize import DOCUMENT_DTYPE, TokenizeTask
from leviathan.data.tokenizer import Tokenizer, UnencodableText
from leviathan.errors import DataError
from leviathan.formatting import format_bytes

_SAMPLE_DOCUMENTS = 500
_SAMPLE_CHARACTERS = 200_000  # bytes of text to tokenize: 0.1 s
_ROW_OVERHEAD = 36  # bytes per sample in addition to its tokens
_RECORD = DOCUMENT_DTYPE.itemsize


@dataclass(frozen=True)
class DiskUse:
    """Estimated disk space of a preparation, in bytes.

    Attributes:
        parts: the tokenized files, kept until the end.
        data_set: the shards.
        free: free bytes of the filesystem.
    """

    parts: int
    data_set: int
    free: int

    @property
    def fits(self) -> bool:
        """Whether both fit at the same time."""
        return self.parts + self.data_set <= self.free


def announce(
    pending: Sequence[TokenizeTask],
    packed: Sequence[Source],
    tokenizer: Tokenizer,
    seq_len: int,
    epochs: float,
    out: Path,
) -> DiskUse | None:
    """Estimates the disk space from the beginning of a file and prints it.

    Args:
        pending: tasks that are not tokenized yet.
        packed: tasks that will be packed into shards by this process.
        tokenizer: tokenizer of the dataset.
        seq_len: targets per sample.
        epochs: maximum epochs of a document (mixing).
        out: output directory.

    Returns:
        The estimate; None if sizes are unknown or no text can be read.
    """
    sources = [task.source for task in pending]
    sizes = [[source.size() for source in each] for each in (sources, packed)]
    if not pending or None in sizes[0] + sizes[1]:
        return None
    try:
        sample = _sample(pending[0], tokenizer)
    except DataError:
        return None  # reported by the preparation itself, with file and line
    if sample is None:
        return None
    to_tokenize, to_pack = (sum(filter(None, each)) for each in sizes)
    width = np.dtype(token_dtype(tokenizer.vocab_size)).itemsize
    row = (seq_len + 1) * width + _ROW_OVERHEAD
    use = DiskUse(
        parts=round(to_tokenize * (sample.tokens * width + sample.documents * _RECORD)),
        data_set=round(to_pack * sample.tokens / seq_len * row * epochs),
        free=shutil.disk_usage(next(p for p in (out, *out.absolute().parents) if p.exists())).free,
    )
    say(
        f"estimated {sample.tokens * to_tokenize:,.0f} tokens; disk space: "
        f"{format_bytes(use.parts)} for temporary files, {format_bytes(use.data_set)} for the "
        f"dataset, {format_bytes(use.free)} free"
    )
    if not use.fits:
        say(
            "warning: this will not fit. Free some space, choose another out, or let slices "
            "write their parts to separate disks (executor=rank)",
            style="yellow",
        )
    return use


@dataclass(frozen=True)
class _Sample:
    """Tokens and bytes of text per stored byte."""

    tokens: float
    documents: float


def _sample(task: TokenizeTask, tokenizer: Tokenizer) -> _Sample | None:
    """Statistics of the beginning of a task's source."""
    stored = characters = encoded = tokens = documents = 0

    def on_bytes(count: int) -> None:
        nonlocal stored
        stored += count

    items = read(task.source, on_bytes, reading=task.reading)
    for item in islice(items, _SAMPLE_DOCUMENTS):
        if not isinstance(item, Document) or not item.text or not task.wants(item.subset):
            continue
        documents += 1
        characters += len(item.text)
        if encoded < _SAMPLE_CHARACTERS:
            text = item.text[: _SAMPLE_CHARACTERS - encoded]
            try:
                tokens += len(tokenizer.encode_array(text))
            except UnencodableText:
                continue
            encoded += len(text)
    if not tokens or not stored:
        return None
    return _Sample((characters * tokens / encoded + documents) / stored, documents / stored)
