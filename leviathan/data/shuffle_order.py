"""The order of training rows: a pure function of (fingerprint, seed, epoch, position).

The split's shards are permuted, their rows laid end to end, and the rows shuffled within
consecutive windows. So training reads a few shards at a time, and any position of any epoch is
found directly, with nothing to replay. Neither workers, ranks, engine nor model enter.
"""

import hashlib
from functools import lru_cache

import numpy as np


class ShuffleOrder:
    """Which row stands at each position of an endless training stream.

    Args:
        shard_rows: int64 [shards], rows in each shard.
        fingerprint: of the dataset.
        seed: another seed is another order.
        window: rows shuffled together.
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
        """Row numbers at positions `start … start + count - 1`, across epochs; int64 [count]."""
        pieces: list[np.ndarray] = []
        while count > 0:
            epoch, position = divmod(start, self.rows)
            window, offset = divmod(position, self._window)
            piece = self._rows_of_window(epoch, window)[offset : offset + count]
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return np.concatenate(pieces)

    def _permute_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards in this epoch's order, and where each of them ends in the epoch."""
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
    """A permutation of `size` numbers that depends on `key` alone, on no library's version.

    Source: the splitmix64 generator (Steele, Lea, Flood 2014), sorted.
    """
    start = np.frombuffer(hashlib.sha256(key.encode()).digest(), "<u8", 1)
    with np.errstate(over="ignore"):
        x = start + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable")
