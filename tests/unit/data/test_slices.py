"""Several processes, each with a slice of the files, and the merge of their output."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from errors import raises_error
from prep_cases import hashes, shards, start_preparation

from leviathan.config.data import PrepConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.prepare import merge, prepare, verify
from leviathan.data.prepare.workdir import PrepSlice, lock_for_slice, lock_for_writing, read_slice

Config = Callable[..., PrepConfig]
WORLD = 3


@pytest.fixture
def source(tmp_path: Path) -> dict[str, Any]:
    texts = [[f"{n} {text} " + "word " * (n + 1) for text in range(40)] for n in range(7)]
    keys = {"paths": shards(tmp_path / "in", texts)}
    return {"source": keys, "validation": {"fraction": 0.1}, "on_error": "quarantine"}


def here(config: PrepConfig, rank: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A slice in this process."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    return prepare(config)


def test_three_at_once_equal_one_machine(
    config: Config, source: dict[str, Any], tmp_path: Path
) -> None:
    alone = config(**source, out=tmp_path / "alone")
    expected = prepare(alone)
    wanted = config(**source, executor="rank")
    running = [
        start_preparation(wanted, RANK=str(rank), WORLD_SIZE=str(WORLD)) for rank in range(WORLD)
    ]
    for process in running:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert merge(wanted.out, [], workers=2) == expected
    assert hashes(wanted.out) == hashes(alone.out)
    assert merge(wanted.out, []) == expected  # again: it is complete


def test_folders_of_their_own(
    config: Config, source: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = config(**source, out=tmp_path / "alone", deduplicate=True)
    expected = prepare(alone)
    outs = [tmp_path / f"rank{rank}" for rank in range(WORLD)]
    for rank, out in enumerate(outs):
        wanted = config(**source, executor="rank", out=out, deduplicate=True)
        assert here(wanted, rank, monkeypatch)["files"] == len(range(rank, 7, WORLD))
    with raises_error("dataset.not_found"):
        DatasetInfo.load(outs[1])
    out = tmp_path / "merged"
    with raises_error("merge.incomplete", "01.jsonl.zst"):
        merge(out, [outs[0], outs[2]])
    assert merge(out, outs) == expected
    assert hashes(out) == hashes(alone.out)
    assert verify(out)["verified"]
    assert (outs[0] / ".prep/parts/00000").is_dir()  # kept: they belong to the user
    assert merge(out, outs) == expected  # again: it is complete, and made of these
    other = config(**source, executor="rank", out=tmp_path / "other", seq_len=16)
    here(other, 0, monkeypatch)
    with raises_error("merge.other_config"):
        merge(out, [*outs, other.out])
    with raises_error("merge.not_found"):
        merge(out, [tmp_path / "nowhere"])


def test_a_lost_slice_is_named_and_made_again(
    config: Config, source: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(**source, executor="rank")
    for rank in (0, 2):
        here(wanted, rank, monkeypatch)
    with raises_error("merge.incomplete", "01.jsonl.zst", "04.jsonl.zst"):
        merge(wanted.out, [])
    here(wanted, 1, monkeypatch)
    part = wanted.out / ".prep/parts/00004"
    before = (part / "ids").stat().st_mtime_ns
    assert here(wanted, 1, monkeypatch)["files"] == 2
    assert (part / "ids").stat().st_mtime_ns == before
    assert merge(wanted.out, [])["documents"] == 280


def test_one_writer_a_slice(
    config: Config, source: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(**source, executor="rank")
    with lock_for_slice(wanted.out, 1, WORLD):
        with raises_error("prep.locked"):
            here(wanted, 1, monkeypatch)
        here(wanted, 0, monkeypatch)
        with raises_error("prep.locked"):
            merge(wanted.out, [])
        with raises_error("prep.locked"):
            prepare(config(**source))
    with (
        lock_for_writing(wanted.out),
        raises_error("prep.locked"),
    ):
        here(wanted, 1, monkeypatch)
    here(wanted, 1, monkeypatch)
    here(wanted, 2, monkeypatch)
    assert merge(wanted.out, [])["documents"] == 280
    assert not list(wanted.out.glob(".prep*"))


def test_a_merge_refuses_what_does_not_belong_together(
    config: Config, source: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises_error("merge.no_slices"):
        merge(tmp_path / "nowhere", [])
    outs = [tmp_path / f"rank{rank}" for rank in range(WORLD)]
    here(config(**source, executor="rank", out=outs[0]), 0, monkeypatch)
    with raises_error("merge.not_found", "rank1"):
        merge(outs[0], [outs[1]])
    with raises_error("merge.no_slices"):
        merge(outs[0], [tmp_path / "in"])
    here(config(**source, executor="rank", out=outs[1], seq_len=16), 1, monkeypatch)
    with raises_error("merge.other_config", "rank1"):
        merge(outs[0], [outs[1]])
    folder = source | {"source": {"paths": [str(tmp_path / "in")]}}
    here(config(**folder, executor="rank"), 0, monkeypatch)
    (tmp_path / "in/99.jsonl").write_text('{"text": "late"}')
    with raises_error("prep.other_sources", "99.jsonl"):
        here(config(**folder, executor="rank"), 1, monkeypatch)


def test_bad_lines_are_counted_over_all_slices(
    config: Config, source: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"txt": 1}\n' * 150)
    source["source"]["paths"].append(str(bad))
    tolerant = config(**source, executor="rank", max_reject_fraction=0.5, out=tmp_path / "t")
    for rank in range(WORLD):  # one of them holds 150 bad lines and 80 good ones
        here(tolerant, rank, monkeypatch)
    assert merge(tolerant.out, [])["rejected"] == 150
    strict = config(**source, executor="rank", max_reject_fraction=0.3, out=tmp_path / "s")
    for rank in range(WORLD):
        here(strict, rank, monkeypatch)
    with raises_error("prep.too_many_rejects", "150", "430"):
        merge(strict.out, [])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "2", "WORLD_SIZE": "8"}, PrepSlice(2, 8)),
        (
            {
                "SLURM_ARRAY_TASK_ID": "5",
                "SLURM_ARRAY_TASK_MIN": "4",
                "SLURM_ARRAY_TASK_MAX": "7",
                "SLURM_ARRAY_TASK_COUNT": "4",
            },
            PrepSlice(1, 4),
        ),
    ],
)
def test_who_am_i(environment: dict[str, str], expected: PrepSlice) -> None:
    assert read_slice(environment) == expected
    assert "RANK" not in environment


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, ("slices.no_rank", "RANK", "WORLD_SIZE", "SLURM_ARRAY_TASK_ID")),
        ({"RANK": "1"}, ("slices.no_rank", "WORLD_SIZE")),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ("slices.invalid_rank", "RANK=", "x")),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("slices.invalid_rank",)),
        (
            {
                "SLURM_ARRAY_TASK_ID": "4",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_ARRAY_TASK_MAX": "8",
                "SLURM_ARRAY_TASK_COUNT": "3",
            },
            ("slices.invalid_array",),
        ),
    ],
)
def test_launches_that_cannot_work(environment: dict[str, str], message: str) -> None:
    with raises_error(*message):
        read_slice(environment)


# ---------------------------------------------------------------- Ray

_CLUSTER = """
import os, subprocess, sys, ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
address = ray.get_runtime_context().gcs_address
done = subprocess.run(sys.argv[1:], env=os.environ | {"RAY_ADDRESS": address})
ray.shutdown()
sys.exit(done.returncode)
"""


def through_ray(cluster: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leviathan", "prep", *arguments, "executor=ray"]
    if cluster:
        command = [sys.executable, "-c", _CLUSTER, *command]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.heavy
def test_a_ray_cluster(config: Config, source: dict[str, Any], tmp_path: Path) -> None:
    """A real one on this machine; the preparation is another process than its head."""
    pytest.importorskip("ray")
    alone = config(**source, out=tmp_path / "alone")
    prepare(alone)
    yaml = tmp_path / "prep.yaml"
    wanted = config(**source, out=tmp_path / "ray")
    yaml.write_text(wanted.model_dump_json(exclude={"executor"}))
    result = through_ray(True, str(yaml))
    assert result.returncode == 0, result.stderr
    assert hashes(wanted.out) == hashes(alone.out)
    shutil.copy(source["source"]["paths"][0], tmp_path / "in/00.whole")
    Path(source["source"]["paths"][0]).write_bytes(b"\x28\xb5\x2f\xfd cut off")
    result = through_ray(True, str(yaml), f"out={tmp_path / 'corrupt'}")
    assert result.returncode == 2
    assert "00.jsonl.zst" in result.stderr
    assert "Traceback" not in result.stderr
    result = through_ray(False, str(yaml), f"out={tmp_path / 'none'}")
    assert result.returncode == 2
    assert "no Ray cluster at auto" in result.stderr
