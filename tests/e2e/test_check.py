"""The estimates of `leviathan check` match the run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from leviathan.parallel.launch_env import free_port

REPOSITORY = Path(__file__).parents[2]
SIZES = 0.03  # of a checkpoint: DCP's own index is not in the estimate


def leviathan(*words):
    return subprocess.run(
        [sys.executable, "-m", "leviathan", *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def checked(*words, status=0):
    """The JSON object of a check, its rows by name."""
    done = leviathan("check", *words, "--device", "cpu", "--port", free_port(), "--json")
    assert done.returncode == status, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return found, {row["subject"]: row for row in found["findings"]}


@pytest.fixture
def run_file(tiny_dataset, tmp_path):
    run = {
        "run_dir": str(tmp_path / "run"),
        "data": {"path": str(tiny_dataset)},
        "model": {
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 2,
            "seq_len": 32,
            "vocab_size": 601,
            "padded_vocab_size": 608,
            "embedding": {"kind": "tied"},
        },
        "train": {"steps": 22, "global_batch_size": 8, "micro_batch_size": 4, "log_every": 1},
        "engine": {"kind": "fsdp2"},
        "checkpoint": {"every": 4, "keep_last": 2, "keep_every": 8},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def test_what_is_foretold_happens(run_file, tiny_dataset):
    run_dir = run_file.parent / "run"
    before, rows = checked(run_file)
    assert {row["level"] for row in rows.values()} <= {"ok", "warning"}
    assert before["starts_at_step"] == 0
    assert not run_dir.exists()
    done = leviathan("train", run_file)
    assert done.returncode == 0, done.stderr

    log = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in log if "loss" in line]
    assert before["steps"] == steps[-1]["step"] == 22
    info = json.loads((tiny_dataset / "dataset.json").read_text())
    rows_read = before["epochs"] * info["splits"]["train"]["rows"]
    assert rows_read == pytest.approx(22 * 8)
    assert before["tokens"] == pytest.approx(steps[-1]["tokens"], rel=0.01)  # the last row is short
    described = json.loads((run_dir / "run.json").read_text())
    assert before["parameters"]["total"] == described["parameters"]["total"]
    kept = sorted((run_dir / "checkpoints").glob("step-*"))
    assert [path.name[-2:] for path in kept] == ["08", "16", "20", "22"]
    assert before["checkpoints"]["kept"] == len(kept)
    written = sum(file.stat().st_size for file in kept[-1].rglob("*") if file.is_file())
    assert before["checkpoints"]["bytes"] == pytest.approx(written, rel=SIZES)

    after, rows = checked(run_file)
    assert rows["run_dir"]["level"] == "warning"
    assert "complete at step 22" in rows["run_dir"]["message"]
    assert after["starts_at_step"] == 22
    _, rows = checked(run_file, "seed=2", status=2)
    assert "seed: 1234 in the existing run, 2 now" in rows["run_dir"]["message"]


def test_what_will_not_work_is_red_and_all_of_it_is_told(run_file):
    with socket.create_server(("", 0)) as taken:
        done = leviathan(
            "check", run_file, "model.seq_len=64", "data.path=nowhere", "--world-size", "16",
            "--port", taken.getsockname()[1], "--json",
        )  # fmt: skip
    assert done.returncode == 2
    rows = {row["subject"]: row for row in json.loads(done.stdout)["findings"]}
    red = {what for what, row in rows.items() if row["level"] == "error"}
    assert red == {"ranks", "dataset", "port"}
    assert "raise it to at least 16" in rows["ranks"]["message"]
    assert str(os.getpid()) in rows["port"]["message"]
    _, rows = checked(run_file, "model.vocab_size=500", status=2)
    assert rows["tokenizer"]["level"] == "error"
    assert "601" in rows["tokenizer"]["message"]


def test_verified_data_and_too_little_memory(run_file):
    found, rows = checked(run_file, "--verify-data", "--memory-gb", "0.001", status=2)
    assert found["data"]["verified"]
    assert rows["memory"]["level"] == "error"
    assert "train.micro_batch_size" in rows["memory"]["message"]
    memory = found["memory"]
    assert memory["device_bytes"] == 1e6
    assert memory["total"] > memory["weights"] == 4 * found["parameters"]["total"]
