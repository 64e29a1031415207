"""Random access to the rows of an MDS split.

streaming's own reader gives the same rows (a test compares them), but importing it costs 15 s of
CPU time in every rank, and it opens the shard anew for each row.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.errors import DataError

_OPEN_SHARDS = 64  # files kept open; a shuffle window touches few shards at a time


@dataclass(frozen=True)
class Row:
    """One row of a split; see `leviathan.data.format` for the columns.

    Attributes:
        tokens: int64 [seq_len + 1].
        subsets: int64 [documents in the row].
    """

    tokens: np.ndarray
    first_document: int
    subsets: np.ndarray
    n_valid: int


class Rows:
    """The rows of one split (`DATA/train`), by number.

    Raises:
        DataError: index.json or a shard is missing, truncated or of another kind; the message
            names the file.
    """

    def __init__(self, split_dir: Path) -> None:
        self.directory = split_dir
        self.shards = read_index(split_dir)
        self.shard_rows = np.array([shard["samples"] for shard in self.shards], np.int64)
        self._ends = np.cumsum(self.shard_rows)
        self._open: Callable[[int], _Shard] = lru_cache(_OPEN_SHARDS)(self._open_shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        shard = int(np.searchsorted(self._ends, number, side="right"))
        index = int(number - self._ends[shard] + self.shard_rows[shard])
        try:
            return self._open(shard).row(index)
        except (ValueError, IndexError, TypeError) as error:
            file = self.directory / self.shards[shard]["raw_data"]["basename"]
            raise DataError(f"{file}: row {index} is damaged ({error}): copy it again") from None

    def _open_shard(self, index: int) -> "_Shard":
        return _Shard(
            self.directory / self.shards[index]["raw_data"]["basename"], self.shards[index]
        )


def read_index(split_dir: Path) -> list[dict[str, Any]]:
    """The shard entries of `index.json`, each checked against its file's size.

    Raises:
        DataError: as `Rows`.
    """
    path = split_dir / "index.json"
    try:
        shards = json.loads(path.read_bytes())["shards"]
        expected = [(split_dir / s["raw_data"]["basename"], s["raw_data"]["bytes"]) for s in shards]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}: the data set is not complete") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is empty or damaged: copy or prepare the data set again") from None
    if not shards:
        raise DataError(f"{path} lists no shards: the data set is empty")
    for file, size in expected:
        if not file.is_file():
            packed = next(file.parent.glob(f"{file.name}.*"), None)
            hint = f"only {packed.name} is there: unpack it" if packed else "copy it again"
            raise DataError(f"{file}: this shard is missing; {hint}")
        if file.stat().st_size != size:
            raise DataError(
                f"{file}: this shard has {file.stat().st_size:,} bytes instead of {size:,} "
                "(truncated?): copy or prepare the data set again"
            )
    return shards


class _Shard:
    """One open shard: uint32 n, uint32 offsets [n + 1], a JSON header, then the rows' bytes.

    Read, not mapped: a file that shrinks under a map kills the process.
    """

    def __init__(self, path: Path, entry: dict[str, Any]) -> None:
        columns = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
        tokens = columns.get("tokens", "").split(":")
        others = {name: kind for name, kind in columns.items() if name != "tokens"}
        if tokens[0] != "ndarray" or len(tokens) != 3 or others != OTHER_COLUMNS:
            raise DataError(f"{path}: not written by `leviathan prep` (columns {columns})")
        self._dtype, self._width = np.dtype(tokens[1]), int(tokens[2])
        self._file = path.open("rb", buffering=0)
        rows = int.from_bytes(self._read(0, 4), "little")
        if rows != entry["samples"]:
            raise DataError(f"{path}: holds {rows} rows, index.json says {entry['samples']}")
        self._offsets = np.frombuffer(self._read(4, 4 * (rows + 2)), np.uint32)

    def _read(self, begin: int, end: int) -> bytes:
        # Unlike seek and read, safe from several threads at once.
        return os.pread(self._file.fileno(), end - begin, begin)

    def row(self, index: int) -> Row:
        # [subsets' size: 4] [first_document: 8] [n_valid: 8] [subsets] [tokens]
        data = self._read(int(self._offsets[index]), int(self._offsets[index + 1]))
        subsets_end = 20 + int.from_bytes(data[:4], "little")
        first_document, n_valid = np.frombuffer(data, np.int64, 2, 4).tolist()
        # An array of free length begins with a byte (dimensions << 2 | width code) and its length.
        length_bytes = 1 << (data[20] & 3)
        subsets = np.frombuffer(data[21 + length_bytes : subsets_end], np.uint16)
        tokens = np.frombuffer(data, self._dtype, self._width, subsets_end)
        return Row(tokens.astype(np.int64), first_document, subsets.astype(np.int64), n_valid)


OTHER_COLUMNS = {"first_document": "int", "n_valid": "int", "subsets": "ndarray:uint16"}


def columns(seq_len: int, dtype: str) -> dict[str, str]:
    """MDS column encodings of a split."""
    return {"tokens": f"ndarray:{dtype}:{seq_len + 1}", **OTHER_COLUMNS}
