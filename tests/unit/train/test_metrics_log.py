"""metrics.jsonl is read while it is being written."""

import json
from pathlib import Path

import pytest

from leviathan.train.metrics_log import last_step, logged

COMPLETE = json.dumps({"step": 1, "loss": 2.5}) + "\n"


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 2, "forward_s": {"fastest": 1}',  # ends like a complete line
        '{"step": 2, "lo',
        "{}\n",
        "[1]\n",
        '{"step": null, "loss": 1}\n',
    ],
)
def test_an_incomplete_line_is_skipped(tmp_path: Path, torn: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(COMPLETE + torn)
    assert logged(tmp_path, "loss") == {1: 2.5}
    assert last_step(tmp_path) == 1


def test_a_character_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        COMPLETE.encode() + '{"step": 2, "x": "é'.encode()[:-1]
    )
    assert logged(tmp_path, "loss") == {1: 2.5}


def test_no_log_yet(tmp_path: Path) -> None:
    assert logged(tmp_path, "loss") == {}
    assert last_step(tmp_path) == 0
