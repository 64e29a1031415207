"""Rows → batches: what each rank trains on at each step, and what it evaluates."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leviathan.config.schema import ModelConfig
from leviathan.data.dataset import Dataset, open_dataset
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import Sample, ShardReader
from leviathan.data.shuffle_order import ShuffleOrder
from leviathan.errors import DataError

__all__ = ["IGNORE", "Batch", "Sample", "ShardReader", "TrainLoader", "check_fits", "eval_batches"]

IGNORE = -100  # a target that is not scored: padding, or a filler row
PADDING_SAMPLE = -1  # row number of a row that only makes the ranks' batches equally large


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        input_ids: int64 [B, T].
        targets: int64 [B, T], IGNORE where nothing is scored.
        unique_ids: int64 [U], the distinct input ids in rising order, the last one repeated so
            that U takes few values.
        inverse: int64 [B, T] with `unique_ids[inverse] == input_ids`.
        rows: row number of each row, PADDING_SAMPLE for one without targets.
        doc_ids: int64 [B, T], running document number of each target (evaluation only).
        subset_ids: int64 [B, T], subset number of each target, -1 where ignored (evaluation only).
    """

    input_ids: Tensor
    targets: Tensor
    unique_ids: Tensor
    inverse: Tensor
    rows: tuple[int, ...]
    doc_ids: Tensor | None = None
    subset_ids: Tensor | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """The batch with its tensors on `device`."""
        tensors = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors)

    @property
    def n_targets(self) -> int:
        """How many targets are scored."""
        return int((self.targets != IGNORE).sum())


class TrainLoader:
    """The training rows in their seeded order, batch by batch.

    Args:
        data: a dataset, or the folder of a prepared one.
        seed: of the order.
        shuffle_window: rows shuffled together.
        global_batch_size: rows a step, over all ranks.
        micro_batch_size: rows of one micro-batch at most.

    Raises:
        DataError: the dataset is missing or damaged, or smaller than one batch.
    """

    def __init__(
        self,
        data: Dataset | Path,
        seed: int,
        shuffle_window: int,
        global_batch_size: int,
        micro_batch_size: int,
    ) -> None:
        dataset = open_dataset(data) if isinstance(data, Path) else data
        self.info = dataset.info
        self._rows = dataset.rows("train")
        _check_batch(self.info, global_batch_size)
        self._order = ShuffleOrder(
            self._rows.shard_rows, self.info.fingerprint, seed, shuffle_window
        )
        self._global, self._micro = global_batch_size, micro_batch_size
        self._window = shuffle_window
        self._maker = _BatchMaker(self.info)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[tuple[int, int, int], Future[list[Batch]]] | None = None

    def sample_numbers(self, step: int) -> np.ndarray:
        """The global batch of `step` (from 0): int64 [global_batch_size], in order."""
        return self._order.at(step * self._global, self._global)

    def microbatches(self, step: int, dp_rank: int, dp: int) -> list[Batch]:
        """What one rank trains on at `step` (from 0); depends on nothing but the arguments.

        Rank after rank takes a contiguous slice of the global batch, slices differing by at most
        one row. Every rank gets the same number of equally large micro-batches; filler rows
        without targets make up the difference.
        """
        wanted, following = (step, dp_rank, dp), (step + 1, dp_rank, dp)
        ready = self._next
        self._next = (following, self._reader.submit(self._make, *following))
        if ready is not None and ready[0] == wanted:
            return ready[1].result()
        return self._make(*wanted)

    def _make(self, step: int, dp_rank: int, dp: int) -> list[Batch]:
        mine = np.array_split(self.sample_numbers(step), dp)[dp_rank]
        most = -(-self._global // dp)
        micro_batches = -(-most // self._micro)
        size = -(-most // micro_batches)
        filled = np.full(micro_batches * size, PADDING_SAMPLE)
        filled[: len(mine)] = mine
        self._rows.prefetch(self._order.at(step * self._global + self._window, self._global))
        return [
            self._maker.batch(self._rows, numbers)
            for numbers in filled.reshape(micro_batches, size).tolist()
        ]


def eval_batches(
    data: Dataset | Path, split: str, micro_batch_size: int, dp_rank: int = 0, dp: int = 1
) -> Iterator[Batch]:
    """Every row of `split` once, over all ranks, in file order, with document and subset ids.

    Each rank takes a contiguous share and gets equally many batches, filled up with filler rows.

    Raises:
        DataError: the split does not exist, or it is damaged.
    """
    dataset = open_dataset(data) if isinstance(data, Path) else data
    info, rows = dataset.info, dataset.rows(split)
    maker = _BatchMaker(info, with_documents=True)
    share = -(-len(rows) // dp)
    size = min(micro_batch_size, share)
    first = dp_rank * share
    for start in range(first, first + share, size):
        stop = min(start + size, first + share, len(rows))
        numbers = list(range(start, stop))
        yield maker.batch(rows, numbers + [PADDING_SAMPLE] * (size - len(numbers)))


def check_fits(info: DatasetInfo, model: ModelConfig, global_batch_size: int) -> None:
    """Refuses a dataset that this model cannot be trained on.

    Raises:
        DataError: another vocabulary or sequence length, or fewer rows than one batch.
    """
    if model.vocab_size != info.vocab_size:
        raise DataError(
            "data.vocab_size_mismatch",
            f"model.vocab_size is {model.vocab_size:,}, but the dataset was tokenized with "
            f"{info.tokenizer.name}, which has {info.vocab_size:,} ids: set "
            f"model.vocab_size={info.vocab_size}, or prepare the data with the right tokenizer",
        )
    if model.seq_len != info.seq_len:
        raise DataError(
            "data.seq_len_mismatch",
            f"model.seq_len is {model.seq_len}, but the rows of the dataset have {info.seq_len} "
            f"targets: set model.seq_len={info.seq_len}, or prepare the data with that seq_len",
        )
    _check_batch(info, global_batch_size)


def _check_batch(info: DatasetInfo, global_batch_size: int) -> None:
    rows = info.split("train").rows
    if rows < global_batch_size:
        raise DataError(
            "data.too_few_samples",
            f"the dataset has {rows} training rows, fewer than one batch of "
            f"train.global_batch_size={global_batch_size}: use a smaller batch or more text",
        )


class _BatchMaker:
    """Stacks rows into batches and finds the distinct ids, on the loader's CPU."""

    def __init__(self, info: DatasetInfo, with_documents: bool = False) -> None:
        self._info = info
        self._with_documents = with_documents

    def batch(self, rows: ShardReader, numbers: Sequence[int]) -> Batch:
        shape = (len(numbers), self._info.seq_len + 1)
        end = self._info.tokenizer.end_of_text
        tokens = np.full(shape, end, np.int64)
        documents = np.full(shape, -1, np.int64)
        subsets = np.full(shape, -1, np.int64)
        valid = np.zeros((len(numbers), 1), np.int64)
        for place, number in enumerate(numbers):
            if number == PADDING_SAMPLE:
                continue
            row = rows[number]
            tokens[place], valid[place] = row.tokens, row.n_valid
            if self._with_documents:
                # The document changes after each end-of-text; nothing else has that id.
                ids = row.tokens[: row.n_valid]
                index = np.zeros(row.n_valid, np.int64)
                np.cumsum(ids[:-1] == end, out=index[1:])
                if index[-1] >= len(row.subsets):
                    raise DataError(
                        "shard.corrupt", f"{rows.directory}: row {number} is damaged: copy it again"
                    )
                documents[place, : row.n_valid] = row.first_document + index
                subsets[place, : row.n_valid] = row.subsets[index]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        largest = int(tokens.max())
        if largest >= self._info.vocab_size:
            raise DataError(
                "shard.corrupt",
                f"{rows.directory}: id {largest} in rows {list(numbers)} is beyond the vocabulary "
                f"of {self._info.vocab_size}: the shard is damaged or of another dataset",
            )
        if subsets.max() >= len(self._info.subsets):
            raise DataError(
                "shard.corrupt",
                f"{rows.directory}: rows {list(numbers)} are of more subsets than the "
                f"{len(self._info.subsets)} that dataset.json names: one of them is damaged",
            )
        is_target = np.arange(1, shape[1]) < valid
        unique, inverse = _distinct(inputs, self._info.vocab_size)
        return Batch(
            input_ids=torch.from_numpy(inputs.copy()),
            targets=torch.from_numpy(np.where(is_target, targets, IGNORE)),
            unique_ids=torch.from_numpy(unique),
            inverse=torch.from_numpy(inverse),
            rows=tuple(numbers),
            doc_ids=torch.from_numpy(documents[:, 1:].copy()) if self._with_documents else None,
            subset_ids=torch.from_numpy(subsets[:, 1:].copy()) if self._with_documents else None,
        )


def _distinct(ids: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct `ids`, sorted and padded to one of a few sizes, and their places in it.

    A table over the vocabulary is several times faster than sorting.
    """
    place = np.zeros(vocab_size, np.int64)
    place[ids] = 1
    unique = np.flatnonzero(place)
    place[unique] = np.arange(len(unique))
    padded = np.full(padded_count(len(unique)), unique[-1])
    padded[: len(unique)] = unique
    return padded, place[ids]


def padded_count(count: int) -> int:
    """The least of 64 and of 4, 5, 6 and 7 times a power of two that is at least `count`."""
    step = max(16, 1 << max(0, (count - 1).bit_length() - 3))
    return max(64, -(-count // step) * step)
