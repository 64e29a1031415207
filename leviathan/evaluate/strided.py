"""Scores a split in overlapping windows, so that most tokens have a long context."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from leviathan.data.loader import Batch
from leviathan.model.transformer import IGNORE

Targets = tuple[Tensor, Tensor, Tensor]  # ids, documents and subsets, [N] each


def windows(count: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """(first, first scored, end) of windows over `count` targets; each is scored once.

    All but those of the first window are scored after at least `length - stride` others.
    """
    ends = [*range(min(length, count), count, stride), count]
    scored = [0, *ends[:-1]]
    return [(max(0, end - length), start, end) for start, end in zip(scored, ends, strict=True)]


def strided(batches: Iterable[Batch], length: int, stride: int, size: int) -> Iterator[Batch]:
    """The targets of a complete split, in windows `stride` apart.

    Consecutive samples of a dataset form one stream of tokens; if two are not consecutive, a new
    stream starts.

    Args:
        batches: the split in file order, with documents and subsets.
        length: T, inputs of a window.
        stride: targets that a window adds, 1 to T.
        size: windows per batch.

    Yields:
        Batches `[B, T]` like those of `eval_batches`; targets that are not scored are `IGNORE`.
    """
    pending: list[tuple[Tensor, Targets, int]] = []
    number = 0
    for first, (ids, documents, subsets) in _streams(batches):
        inputs = torch.cat([first, ids[:-1]])
        for start, scored, end in windows(len(ids), length, stride):
            part = (ids[start:end], documents[start:end], subsets[start:end])
            pending.append((inputs[start:end], part, scored - start))
            if len(pending) == size:
                yield _batch(pending, number)
                number, pending = number + size, []
    if pending:
        yield _batch(pending, number)


def _streams(batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Targets]]:
    """The first input and all targets of each sequence of consecutive samples."""
    first: Tensor | None = None
    parts: list[Targets] = []
    for batch in batches:
        assert batch.doc_ids is not None
        assert batch.subset_ids is not None
        for row in range(len(batch.targets)):
            counts = batch.targets[row] != IGNORE
            if not counts.any():
                continue
            before = batch.input_ids[row, :1]
            if first is None or not torch.equal(parts[-1][0][-1:], before):
                if first is not None:
                    yield first, _joined(parts)
                first, parts = before, []
            kept = (batch.targets[row], batch.doc_ids[row], batch.subset_ids[row])
            parts.append((kept[0][counts], kept[1][counts], kept[2][counts]))
    if first is not None:
        yield first, _joined(parts)


def _joined(parts: list[Targets]) -> Targets:
    ids, documents, subsets = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, documents, subsets


def _batch(rows: list[tuple[Tensor, Targets, int]], number: int) -> Batch:
    length = max(len(inputs) for inputs, _, _ in rows)
    shape = (len(rows), length)
    inputs = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORE)
    documents, subsets = torch.zeros_like(inputs), torch.full(shape, -1)
    for place, (ids, (next_ids, documents_, subsets_), scored) in enumerate(rows):
        inputs[place, : len(ids)] = ids
        targets[place, scored : len(ids)] = next_ids[scored:]
        documents[place, : len(ids)] = documents_
        subsets[place, scored : len(ids)] = subsets_[scored:]
    distinct, inverse = torch.unique(inputs, return_inverse=True)
    names = tuple(range(number, number + len(rows)))
    return Batch(inputs, targets, distinct, inverse, names, documents, subsets)
