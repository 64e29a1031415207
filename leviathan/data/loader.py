"""Batches of samples for training and evaluation, and the order of the training samples.

The order is a pure function of (fingerprint, seed, epoch, position): the shards of the split are
permuted, their samples concatenated, and the samples shuffled within consecutive windows. Training
therefore reads a few shards at a time, and any position of any epoch is computed directly, without
replay. The order does not depend on workers, ranks, engine or model.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leviathan.config.run import ModelConfig
from leviathan.data.dataset import Dataset, open_dataset
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import ShardReader
from leviathan.errors import DataError


class ShuffleOrder:
    """Maps positions of an infinite training stream to sample numbers.

    Args:
        shard_rows: int64 [shards], samples per shard.
        fingerprint: of the dataset.
        seed: seed of the order.
        window: samples shuffled together.
    """

    def __init__(self, shard_rows: np.ndarray, fingerprint: str, seed: int, window: int) -> None:
        self._shard_rows = shard_rows
        self._starts = np.cumsum(shard_rows) - shard_rows
        self._key = f"{fingerprint}/{seed}/{window}"
        self._window = window
        self.rows = int(shard_rows.sum())
        self._shards_of_epoch = lru_cache(2)(self._permute_shards)
        self._rows_of_window = lru_cache(4)(self._shuffle_window)

    def at(self, start: int, count: int) -> np.ndarray:
        """Sample numbers at positions `start … start + count - 1`, across epochs; int64 [count]."""
        pieces: list[np.ndarray] = []
        while count > 0:
            epoch, position = divmod(start, self.rows)
            window, offset = divmod(position, self._window)
            piece = self._rows_of_window(epoch, window)[offset : offset + count]
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return np.concatenate(pieces)

    def _permute_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards in this epoch's order, and the cumulative number of their samples."""
        order = permutation(f"{self._key}/{epoch}/shards", len(self._shard_rows))
        return order, np.cumsum(self._shard_rows[order])

    def _shuffle_window(self, epoch: int, window: int) -> np.ndarray:
        order, ends = self._shards_of_epoch(epoch)
        first = window * self._window
        positions = np.arange(first, min(first + self._window, self.rows))
        place = np.searchsorted(ends, positions, side="right")
        shard = order[place]
        rows = self._starts[shard] + positions - (ends[place] - self._shard_rows[shard])
        return rows[permutation(f"{self._key}/{epoch}/{window}", len(rows))]


def permutation(key: str, size: int) -> np.ndarray:
    """A permutation of `size` numbers that depends only on `key`, not on the version of a library.

    Source: the splitmix64 generator (Steele, Lea, Flood 2014), sorted.
    """
    start = np.frombuffer(hashlib.sha256(key.encode()).digest(), "<u8", 1)
    with np.errstate(over="ignore"):
        x = start + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable")


IGNORE = -100  # target of a position that is not scored: padding, or a padding sample
PADDING_SAMPLE = -1  # number of a padding sample, which makes the ranks' batches equally large


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        input_ids: int64 [B, T].
        targets: int64 [B, T], IGNORE where no target is scored.
        unique_ids: int64 [U], the distinct input ids in ascending order; the last one is repeated
            so that U takes few values.
        inverse: int64 [B, T] with `unique_ids[inverse] == input_ids`.
        rows: number of each sample, PADDING_SAMPLE for a padding sample.
        doc_ids: int64 [B, T], document number of each target (evaluation only).
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
        """Moves the tensors to `device`."""
        tensors = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **tensors)

    @property
    def n_targets(self) -> int:
        """Number of scored targets."""
        return int((self.targets != IGNORE).sum())


class TrainLoader:
    """The training samples in their seeded order, batch by batch.

    Args:
        data: a dataset, or the directory of a prepared one.
        seed: seed of the order.
        shuffle_window: samples shuffled together.
        global_batch_size: samples per step, over all ranks.
        micro_batch_size: maximum samples per micro-batch.

    Raises:
        DataError: the dataset is missing or corrupt, or smaller than one batch.
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
        """Sample numbers of the global batch of `step` (from 0), int64 [global_batch_size]."""
        return self._order.at(step * self._global, self._global)

    def microbatches(self, step: int, dp_rank: int, dp: int) -> list[Batch]:
        """The micro-batches of one rank at `step` (from 0); a pure function of the arguments.

        Each rank takes a contiguous slice of the global batch; slices differ by at most one sample.
        Every rank gets the same number of equally large micro-batches; padding samples without
        targets make up the difference.
        """
        current, following = (step, dp_rank, dp), (step + 1, dp_rank, dp)
        ready = self._next
        self._next = (following, self._reader.submit(self._make, *following))
        if ready is not None and ready[0] == current:
            return ready[1].result()
        return self._make(*current)

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
    """Yields every sample of `split` once over all ranks, in file order.

    Each rank takes a contiguous share and gets the same number of batches, padded with padding
    samples.

    Raises:
        DataError: the split does not exist, or is corrupt.
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
    """Checks that the model can be trained on the dataset.

    Raises:
        DataError: the vocabulary or sequence length differs, or there are fewer samples than one
            batch.
    """
    if model.vocab_size != info.vocab_size:
        raise DataError(
            "data.vocab_size_mismatch",
            f"model.vocab_size is {model.vocab_size:,}, but the dataset was tokenized with "
            f"{info.tokenizer.name}, which has {info.vocab_size:,} ids. Set "
            f"model.vocab_size={info.vocab_size}, or prepare the data with the matching "
            "tokenizer",
        )
    if model.seq_len != info.seq_len:
        raise DataError(
            "data.seq_len_mismatch",
            f"model.seq_len is {model.seq_len}, but the samples of the dataset have "
            f"{info.seq_len} targets. Set model.seq_len={info.seq_len}, or prepare the data "
            "with that seq_len",
        )
    _check_batch(info, global_batch_size)


def _check_batch(info: DatasetInfo, global_batch_size: int) -> None:
    rows = info.split("train").rows
    if rows < global_batch_size:
        raise DataError(
            "data.too_few_samples",
            f"the dataset has {rows} training samples, fewer than one batch of "
            f"train.global_batch_size={global_batch_size}. Use a smaller batch or more text",
        )


class _BatchMaker:
    """Collates samples into batches and computes the distinct ids, on the CPU."""

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
                # The document changes after each end-of-text id, which occurs nowhere else.
                ids = row.tokens[: row.n_valid]
                index = np.zeros(row.n_valid, np.int64)
                np.cumsum(ids[:-1] == end, out=index[1:])
                if index[-1] >= len(row.subsets):
                    raise DataError(
                        "shard.corrupt",
                        f"{rows.directory}: sample {number} is corrupt. Copy it again",
                    )
                documents[place, : row.n_valid] = row.first_document + index
                subsets[place, : row.n_valid] = row.subsets[index]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        largest = int(tokens.max())
        if largest >= self._info.vocab_size:
            raise DataError(
                "shard.corrupt",
                f"{rows.directory}: id {largest} in samples {list(numbers)} is beyond the "
                f"vocabulary of {self._info.vocab_size}: corrupt, or not of this dataset",
            )
        if subsets.max() >= len(self._info.subsets):
            raise DataError(
                "shard.corrupt",
                f"{rows.directory}: samples {list(numbers)} are of more subsets than the "
                f"{len(self._info.subsets)} that dataset.json names: one of them is corrupt",
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
    """The distinct ids, sorted and padded to one of a few sizes, and the index of each id.

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
    """The smallest of 64 and of 4, 5, 6 and 7 times a power of two that is at least `count`."""
    step = max(16, 1 << max(0, (count - 1).bit_length() - 3))
    return max(64, -(-count // step) * step)
