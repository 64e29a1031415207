"""What the quickstart and experiments read of a log that is being written."""

import json
from pathlib import Path

import pytest

from leviathan.quickstart import last_step, logged

WHOLE = json.dumps({"step": 1, "loss": 2.5}) + "\n"


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 2, "forward_s": {"fastest": 1}',  # ends as a whole line does
        '{"step": 2, "lo',
        "{}\n",
        "[1]\n",
        '{"step": null, "loss": 1}\n',
    ],
)
def test_a_torn_or_foreign_line_is_passed_over(tmp_path: Path, torn: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(WHOLE + torn)
    assert logged(tmp_path, "loss") == {1: 2.5}
    assert last_step(tmp_path) == 1


def test_a_character_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(WHOLE.encode() + '{"step": 2, "x": "é'.encode()[:-1])
    assert logged(tmp_path, "loss") == {1: 2.5}


def test_no_log_yet(tmp_path: Path) -> None:
    assert logged(tmp_path, "loss") == {}
    assert last_step(tmp_path) == 0
