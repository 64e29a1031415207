"""Disk space: estimates before the work, and behavior on a full disk."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from prep_cases import hashes, shards, start_preparation

from leviathan.config.data import PrepConfig
from leviathan.data.prepare import checks as estimate
from leviathan.data.prepare import prepare
from leviathan.data.prepare.sources import Source, find_inputs
from leviathan.data.prepare.tokenize import TokenizeTask
from leviathan.data.tokenizer import load_tokenizer

Config = Callable[..., PrepConfig]


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    random = np.random.default_rng(0)
    texts = [[" ".join(map(str, random.integers(0, 9999, 4000)))] * 5 for _ in range(6)]
    return shards(tmp_path / "in", texts)


def tasks(sources: Sequence[Source]) -> list[TokenizeTask]:
    return [TokenizeTask(source, "train", Path(), Path(), 0, False, 1) for source in sources]


def use_of(
    pending: Sequence[Source], packed: Sequence[Source], tokenizer: Path, out: Path, epochs: float
) -> estimate.DiskUse:
    use = estimate.announce(tasks(pending), packed, load_tokenizer(tokenizer), 32, epochs, out)
    assert use is not None
    return use


def test_the_estimate_is_near_what_is_written(
    config: Config,
    corpus: list[str],
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = find_inputs(corpus)
    use = use_of(sources, sources, tiny_tokenizer, tmp_path / "not/yet", 1)
    wanted = config(source={"paths": corpus}, executor="rank")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    prepare(wanted)
    parts = sum(path.stat().st_size for path in (wanted.out / ".prep/parts").rglob("*"))
    assert abs(use.parts - parts) < 0.1 * parts
    prepare(config(source={"paths": corpus}))
    written = sum(path.stat().st_size for path in (wanted.out / "train").iterdir())
    assert abs(use.data_set - written) < 0.1 * written
    assert use.fits
    assert use.free > 0
    messages = capsys.readouterr().err
    assert "tokens; disk space: " in messages
    assert "warning" not in messages
    half = use_of(sources[:3], sources, tiny_tokenizer, tmp_path, 3)
    assert half.parts < 0.6 * use.parts
    assert half.data_set == pytest.approx(3 * use.data_set, rel=1e-6)


def test_a_warning_where_it_will_not_fit(
    config: Config,
    corpus: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    prepare(config(source={"paths": corpus}))
    assert "warning: this will not fit" in capsys.readouterr().err


def test_nothing_is_said_where_nothing_can_be_known(
    corpus: list[str], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    for name in ("empty.jsonl", "bad.jsonl"):
        sources = find_inputs([str(tmp_path / name)])
        assert estimate.announce(tasks(sources), sources, tokenizer, 32, 1, tmp_path) is None
    assert estimate.announce([], [], tokenizer, 32, 1, tmp_path) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a filesystem cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_ends_it_and_more_room_continues_it(
    config: Config, corpus: list[str], small_disk: Path, tmp_path: Path, workers: int
) -> None:
    alone = config(source={"paths": corpus}, out=tmp_path / "alone")
    prepare(alone)
    parts = 2 * sum(path.stat().st_size for path in (alone.out / "train").iterdir())
    wanted = config(source={"paths": corpus}, out=small_disk / "out", workers=workers)
    # First no room for the parts, then none for the shards, then enough.
    for size in (parts // 5, parts * 7 // 10, 4 * parts):
        options = f"remount,size={size}"
        subprocess.run(["mount", "-o", options, str(small_disk)], check=True)
        process = start_preparation(wanted)
        _, errors = process.communicate()
        if size < parts:
            assert process.returncode == 1  # a DataError; the command line makes it exit status 2
            assert "DataError: preparing" in errors
            assert "No space left on device" in errors
            assert "run the same command to resume" in errors
            assert not (wanted.out / "dataset.json").exists()
        else:
            assert "resuming: 6 of 6" in errors
    assert hashes(wanted.out) == hashes(alone.out)
    assert json.loads((wanted.out / "dataset.json").read_text())["documents"] == 30
