"""`scripts/quickstart.sh` with a small corpus and model: every step is real."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from documentation import ROOT, TINY_CORPUS_BYTES, TINY_RUN, TINY_VOCAB_SIZE, programs

STEPS = 12


def start(out: Path) -> subprocess.Popen[str]:
    """Starts the script in a directory outside the repository."""
    programs(out.parent)
    environment = os.environ | {
        "PATH": f"{out.parent / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OUT": str(out),
        "CORPUS_BYTES": str(TINY_CORPUS_BYTES),
        "VOCAB_SIZE": str(TINY_VOCAB_SIZE),
        "STEPS": str(STEPS),
    }
    return subprocess.Popen(
        [ROOT / "scripts/quickstart.sh", *TINY_RUN],
        cwd=out.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Bash cannot handle a signal that is ignored where the tests started, as after `nohup`.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def steps_of(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if '"loss"' in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """Output directory and standard error of a script interrupted by Ctrl-C and started again."""
    out = tmp_path_factory.mktemp("quickstart") / "out"
    first = start(out)
    while first.poll() is None and not steps_of(out / "runs/tied"):
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGINT)
    _, errors = first.communicate()
    assert first.returncode == 130, errors
    assert "Run the same command to resume" in errors
    process = start(out)
    stdout, errors = process.communicate()
    assert process.returncode == 0, errors[-4000:] + stdout[-2000:]
    return out, errors


@pytest.mark.timeout(1200)
def test_report(finished):
    out, errors = finished
    assert "does not show which model is better" in errors
    page = (out / "report" / "report.html").read_text()
    assert "leviathan" in page
    assert "tied" in page
    assert not re.search(r'(src|href)="https?://', page)


@pytest.mark.timeout(1200)
def test_both_runs_trained_on_every_step_once(finished):
    out, _ = finished
    for name in ("tied", "leviathan"):
        assert steps_of(out / "runs" / name) == list(range(1, STEPS + 1))
    exported = out / "export"
    assert {"config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}


@pytest.mark.timeout(1200)
def test_a_second_run_trains_and_evaluates_nothing(finished):
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*.distcp")}
    process = start(out)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "leviathan launch" not in errors
    assert errors.count(" exists") >= 9
    assert before
    assert before == {path: path.stat().st_mtime_ns for path in before}
