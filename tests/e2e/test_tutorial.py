"""All commands of docs/tutorial.md in order, with a corpus and a model that take seconds."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from documentation import (
    PATIENCE_S,
    ROOT,
    TINY_CORPUS_BYTES,
    TINY_RUN,
    TINY_VOCAB_SIZE,
    programs,
    run,
    runnable,
    start,
)

from leviathan.config.load import read_config

STEPS = 80  # enough for the signal to arrive before the last one
SMALLER = {
    "--out quickstart/corpus": f"--out quickstart/corpus --max-bytes {TINY_CORPUS_BYTES}",
    "--vocab-size 8192": f"--vocab-size {TINY_VOCAB_SIZE}",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory like the root of the repository, with a smaller run."""
    for name in ("launch", "data_prep"):
        (tmp_path / name).symlink_to(ROOT / name)
    for part in ("run", "data"):
        (tmp_path / "configs" / part).mkdir(parents=True)
    data = ROOT / "configs/data/quickstart.yaml"
    (tmp_path / "configs/data/quickstart.yaml").write_text(data.read_text())
    changes = [*TINY_RUN, f"train.steps={STEPS}", "train.eval_every=40", "checkpoint.every=0"]
    small, _ = read_config(ROOT / "configs/run/quickstart.yaml", changes)
    (tmp_path / "configs/run/quickstart.yaml").write_text(yaml.safe_dump(small))
    programs(tmp_path)
    return tmp_path


def logged(run_dir: Path) -> int:
    """Returns the last step in a run's log; 0 without a log."""
    with suppress(FileNotFoundError, ValueError):
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines), default=0)
    return 0


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_every_command_of_the_tutorial(place: Path) -> None:
    lines = runnable("docs/tutorial.md")
    leviathan = place / "quickstart/runs/leviathan"
    interrupted = 0
    for number, line in enumerate(lines):
        command = line
        for given, smaller in SMALLER.items():
            command = command.replace(given, smaller)
        later = lines[number + 1 :]
        if line.endswith("--ranks 2") and any(other.startswith("kill ") for other in later):
            interrupted += 1
            assert _interrupted(command, later, place, leviathan) < STEPS
        elif not line.startswith("kill "):
            output = run(command, place)
            assert output.strip() or "train" in line or "launch" in line, line
    assert interrupted == 1
    assert logged(leviathan) == logged(place / "quickstart/runs/tied") == STEPS
    assert (place / "quickstart/export/model.safetensors").is_file()
    page = (place / "quickstart/report/report.html").read_text()
    assert "next_line" in page
    card = (place / "quickstart/export/README.md").read_text()
    assert "next_line" in card or "nats" in card


def _interrupted(command: str, later: list[str], place: Path, run_dir: Path) -> int:
    """Sends the `kill` of the page during training; returns the last logged step."""
    (kill,) = (line for line in later if line.startswith("kill "))
    process = start(command, place)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while logged(run_dir) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run(kill, place)
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, out + errors
        (saved,) = (run_dir / "checkpoints").glob("step-????????")
        assert f"step {int(saved.name[5:]):,}" in out + errors
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return logged(run_dir)
