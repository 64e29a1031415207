"""Small corpora, and helpers that read a prepared dataset."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from leviathan.config.data import PrepConfig
from leviathan.data.mds import ShardReader


def shards(folder: Path, texts: list[list[str]], subset: str = "s") -> list[str]:
    """Writes one jsonl.zst a list of texts; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, part in enumerate(texts):
        lines = [json.dumps({"text": t, "meta": {"pile_set_name": subset}}) for t in part]
        path = folder / f"{number:02}.jsonl.zst"
        path.write_bytes(zstandard.ZstdCompressor().compress("\n".join(lines).encode()))
        paths.append(str(path))
    return paths


def stream_of(split: Path) -> np.ndarray:
    """The id stream that the rows of a split cover, put together again."""
    rows = list(ShardReader(split))
    return np.concatenate(
        [rows[0].tokens[: rows[0].n_valid], *(row.tokens[1 : row.n_valid] for row in rows[1:])]
    )


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# Shards of few rows, so that a small corpus makes many: in this process and in its workers.
_PROGRAM = """
import sys
from leviathan.config.data import PrepConfig
from leviathan.data.prepare import packing, prepare
if int(sys.argv[2]):
    packing.samples_per_shard = lambda *_: int(sys.argv[2])
if __name__ == "__main__":
    prepare(PrepConfig.model_validate_json(sys.argv[1], strict=False))
"""


def start_preparation(
    config: PrepConfig, samples_per_shard: int = 0, **environment: str
) -> subprocess.Popen[str]:
    """`prepare(config)` in a separate process group."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, config.model_dump_json(), str(samples_per_shard)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    )


def wait_for_orphans(session: int) -> None:
    """Worker processes end by themselves when their parent is gone."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("worker processes outlived the killed preparation")
