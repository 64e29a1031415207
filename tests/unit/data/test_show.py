"""What people see of a dataset."""

from collections.abc import Callable
from pathlib import Path

import pytest
from errors import raises_error
from prep_cases import shards

from leviathan.config.data import PrepConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.prepare import prepare
from leviathan.data.show import format_bytes, info_table, samples_text, show_samples

Config = Callable[..., PrepConfig]


@pytest.fixture
def data(config: Config, tmp_path: Path) -> Path:
    paths = shards(tmp_path / "a", [["def one(): pass", "x", "[red]no markup[/red] " * 30]], "A")
    paths += shards(tmp_path / "b", [["the second subset"]], "B (old)")
    wanted = config(source={"paths": paths}, seq_len=16)
    prepare(wanted)
    return wanted.out


def test_rows_put_together_are_the_documents(data: Path) -> None:
    info = DatasetInfo.load(data)
    result = show_samples(data, "train", 0, 10**6)
    assert [row["row"] for row in result["rows"]] == list(range(info.splits["train"].rows))
    texts: dict[int, str] = {}
    for row in result["rows"]:
        assert row["n_valid"] == sum(document["ids"] for document in row["documents"])
        assert row["n_valid"] + row["padding"] == 17
        for document in row["documents"]:
            assert document["begins"] == (document["document"] not in texts)
            texts.setdefault(document["document"], "")
    assert list(texts) == [0, 1, 2, 3]
    first, second = result["rows"][0]["documents"][:2]
    assert (first["text"], first["subset"], first["ends"]) == ("def one(): pass", "A", True)
    assert (second["document"], second["text"]) == (1, "x")
    last = result["rows"][-1]["documents"][-1]
    assert (last["subset"], last["ends"]) == ("B (old)", True)
    assert result["rows"][-1]["padding"] > 0


def test_text_marks_borders_and_padding(data: Path) -> None:
    rows = DatasetInfo.load(data).splits["train"].rows
    text = samples_text(show_samples(data, "train", 0, rows))
    assert "[document 0 · A · " in text
    assert "def one(): pass⏎" in text
    assert "[red]" in text  # printed literally
    assert "continued from the previous sample" in text
    assert "ids of padding, not trained on]" in text


def test_rows_that_are_not_there(data: Path) -> None:
    with raises_error("data.no_sample", "999"):
        show_samples(data, "train", 999, 1)
    with raises_error("dataset.no_split", "val"):
        show_samples(data, "val", 0, 1)


def test_info_is_a_table_with_units(data: Path) -> None:
    table = info_table(DatasetInfo.load(data).summary())
    assert "16 targets each, uint16" in table
    assert "B (old)" in table
    assert "bytes / token" in table
    assert " bytes" in table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (7, "7 bytes"),
        (1500, "1.5 kB"),
        (2.5e9, "2.5 GB"),
        (1.32e12, "1.3 TB"),
        (2e15, "2,000.0 TB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert format_bytes(count) == text
