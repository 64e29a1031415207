"""The order of training samples: a pure function of (fingerprint, seed, epoch, position).

The shards of the split are permuted, their samples concatenated, and the samples shuffled within
consecutive windows. Training therefore reads a few shards at a time, and any position of any epoch
is computed directly, without replay. The order does not depend on workers, ranks, engine or model.
"""

import hashlib
from functools import lru_cache

import numpy as np


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
