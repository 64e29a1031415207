"""MDS shards of rows: writing them, and random access to them.

The bytes are those that streaming's MDSWriter writes, and streaming reads them (tests compare
both); but importing it takes 15 s of CPU time, in every rank and every preparation, and its reader
opens the shard anew for each row. So streaming is needed for `remote` data sets only.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.data.files import write_atomic
from leviathan.errors import DataError

_OPEN_SHARDS = 64  # files kept open; a shuffle window touches few shards at a time


OTHER_COLUMNS = {"first_document": "int", "n_valid": "int", "subsets": "ndarray:uint16"}


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


class RowWriter:
    """Writes rows to `shard.00000.mds` … and, on `finish`, `index.json` in a new folder.

    Args:
        out: created; must not exist.
        seq_len: each row holds one id more.
        dtype: of the ids, uint16 or uint32.
        shard_bytes: size at which the next shard begins.
    """

    def __init__(self, out: Path, seq_len: int, dtype: str, shard_bytes: int) -> None:
        out.mkdir(parents=True)
        self._out, self._limit = out, shard_bytes
        columns = OTHER_COLUMNS | {"tokens": f"ndarray:{dtype}:{seq_len + 1}"}
        width = (seq_len + 1) * np.dtype(dtype).itemsize
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": ["sha256"],
            "size_limit": shard_bytes,
            "column_names": list(columns),
            "column_encodings": list(columns.values()),
            "column_sizes": [8, 8, None, width],
        }
        self._header = json.dumps(self._config, sort_keys=True).encode()
        self._shards: list[dict[str, Any]] = []
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._rows: list[bytes] = []
        self._bytes = 8 + len(self._header)

    def write(
        self, tokens: np.ndarray, n_valid: int, first_document: int, subsets: np.ndarray
    ) -> None:
        """Appends one row; `tokens` in the dtype given, `subsets` uint16."""
        # An array of free length: a byte (dimensions << 2 | width code), its length, its values.
        code = 0 if len(subsets) < 1 << 8 else 1 if len(subsets) < 1 << 16 else 2
        listed = bytes([1 << 2 | code]) + len(subsets).to_bytes(1 << code, "little")
        listed += subsets.tobytes()
        numbers = np.array([first_document, n_valid], np.int64).tobytes()
        row = len(listed).to_bytes(4, "little") + numbers + listed + tokens.tobytes()
        if self._bytes + len(row) + 4 > self._limit:
            self._end_shard()
        self._rows.append(row)
        self._bytes += len(row) + 4

    def _end_shard(self) -> None:
        sizes = np.array([0, *map(len, self._rows)])
        begin = 4 + 4 * len(sizes) + len(self._header)
        offsets = (np.cumsum(sizes) + begin).astype(np.uint32)
        count = len(self._rows).to_bytes(4, "little")
        content = b"".join([count, offsets.tobytes(), self._header, *self._rows])
        name = f"shard.{len(self._shards):05}.mds"
        (self._out / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        raw = {"basename": name, "bytes": len(content), "hashes": {"sha256": digest}}
        entry = {"samples": len(self._rows), "raw_data": raw, "zip_data": None}
        self._shards.append(entry | self._config)
        self._begin_shard()

    def finish(self) -> None:
        """Writes the last shard and the index."""
        if self._rows:
            self._end_shard()
        index = json.dumps({"version": 2, "shards": self._shards}, sort_keys=True)
        write_atomic(self._out / "index.json", index.encode())
