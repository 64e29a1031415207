"""`make quickstart` at a tiny size: every step for real, only smaller."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def quickstart(out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leviathan.quickstart", "--tiny", "--out", str(out)]
    # Away from the checkout, as a user would stand anywhere.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=out.parent, env=environment
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("quickstart") / "out"
    return out, quickstart(out)


@pytest.mark.timeout(1200)
def test_it_ends_with_table_and_report(finished):
    out, result = finished
    assert result.returncode == 0, result.stderr[-4000:] + result.stdout[-2000:]
    assert "equal bit for bit" in result.stderr
    assert "SIGTERM to process" in result.stderr
    assert "not which model is better" in result.stderr
    page = (out / "report" / "report.html").read_text()
    assert "leviathan" in page
    assert "tied" in page
    assert not re.search(r'(src|href)="https?://', page)


@pytest.mark.timeout(1200)
def test_both_arms_saw_the_same_tokens_and_every_step_once(finished):
    out, _ = finished
    for arm in ("tied", "leviathan"):
        lines = (out / "runs" / arm / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines if '"loss"' in line]
        assert steps == list(range(1, 13))
    exported = out / "export"
    assert {"config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}


@pytest.mark.timeout(1200)
def test_again_it_finds_everything_done(finished):
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*.distcp")}
    again = quickstart(out)
    assert again.returncode == 0
    assert "deepspeed" not in again.stderr
    assert again.stderr.count("there already") >= 8
    assert before
    assert before == {path: path.stat().st_mtime_ns for path in before}
