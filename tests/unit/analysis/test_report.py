"""The report from run folders: its numbers, its refusals, and that it needs nothing but itself."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leviathan.analysis.report import build_report, terminal_table
from leviathan.errors import DataError

MakeRun = Any


@pytest.fixture
def pair(make_run: MakeRun) -> list[Path]:
    return [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04)]


def test_numbers(pair: list[Path], tmp_path: Path) -> None:
    report = build_report(pair, tmp_path / "out")
    tied, leviathan = report["runs"]
    assert report["pairing"]["paired"]
    assert tied["validation_loss"] == 5.0
    assert leviathan["perplexity"] == pytest.approx(np.exp(4.96))
    relative = leviathan["relative"]
    assert relative["validation_nats"] == pytest.approx(-0.04)
    assert relative["perplexity_percent"] == pytest.approx(100 * (np.exp(-0.04) - 1))
    assert relative["speed_percent"] == pytest.approx(100 * (7_500 / 9_000 - 1))
    assert relative["parameters"] == 2_137_344 - 2_105_728
    assert tied["train_seconds"] == pytest.approx(200 * 16 * 256 / 9_000)
    assert "relative" not in tied
    last_tenth = [loss for step, loss in steps(report, 0) if step > 180]
    assert tied["train_loss"] == pytest.approx(np.mean(last_tenth))
    assert leviathan["lm_eval"] == [
        {"task": "next_line", "metric": "acc", "value": 0.41, "stderr": 0.049, "samples": 100}
    ]


def steps(report: dict[str, Any], run: int) -> list[tuple[int, float]]:
    curve = report["curves"][run]
    return list(zip(curve["step"], curve["train_loss"], strict=True))


def test_page_holds_the_numbers(pair: list[Path], tmp_path: Path) -> None:
    report = build_report(pair, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    for shown in ("5.0000", "4.9600", "−0.0400", "142.59", "2,137,344", "9,000", "41.0 ± 4.9 %"):
        assert shown in page, shown
    assert "not which model is better" in page
    assert "shows that the mechanics work" in report["verdict"]
    for key in ("model.embedding.kind", "model.embedding.d_seed"):
        assert key in page
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["runs"] == report["runs"]


def test_page_is_self_contained(pair: list[Path], tmp_path: Path) -> None:
    build_report(pair, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.findall(r"https?:|//[a-z]|<script|<link|<img|@import|url\((?!#)", page)
    assert page.count("<svg") == 4  # two plots, each wide and narrow
    ids = re.findall(r' id="([^"]+)"', page)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert used <= set(ids)
    assert all(ids.count(name) == 1 for name in used)


def test_terminal_table(pair: list[Path], tmp_path: Path) -> None:
    text = terminal_table(build_report(pair, tmp_path / "out"))
    assert re.search(r"Validation loss, nats per token\D+5\.0000\D+4\.9600 +−0\.0400", text)
    assert "which model is better" in text


@pytest.mark.parametrize(
    ("change", "named"),
    [({"data": "07e4" * 16}, "training data"), ({"seed": 5}, "data order")],
)
def test_refuses_to_pair(
    make_run: MakeRun, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04, **change)]
    report = build_report(runs, tmp_path / "out")
    assert not report["pairing"]["paired"]
    assert named in report["pairing"]["note"]
    assert all("relative" not in run for run in report["runs"])
    assert report["frequency"]["pairs"] == []
    page = (tmp_path / "out" / "report.html").read_text()
    assert "These runs are not paired" in page
    assert "−0.0400" not in page


def test_unevaluated_and_unfinished_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", evaluated=False)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:11]) + '{"step": 60, "lo')
    report = build_report([run], tmp_path / "out")
    assert report["runs"][0]["step"] == 50
    assert report["runs"][0]["validation_loss"] == pytest.approx(4.95 + 4.1 * np.exp(-50 / 45))
    assert report["frequency"] is None
    assert "50 of 200" in (tmp_path / "out" / "report.html").read_text()


def test_repeated_step_counts_once(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 200, "loss": 4.25, "tokens_per_s": None}) + "\n")
        file.write(json.dumps({"step": 205, "loss": None, "tokens_per_s": 9_000.0}) + "\n")
    report = build_report([run], tmp_path / "out")
    assert steps(report, 0)[-2:] == [(200, 4.25), (205, None)]
    assert report["runs"][0]["train_seconds"] is None


def test_two_runs_of_one_kind_are_told_apart(make_run: MakeRun, tmp_path: Path) -> None:
    report = build_report([make_run("first"), make_run("second", offset=0.01)], tmp_path / "out")
    assert [run["label"] for run in report["runs"]] == ["first", "second"]


def test_text_from_files_is_escaped(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("<b>&")
    build_report([run, make_run("other")], tmp_path / "out")
    assert "<b>&amp" not in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl"])
def test_not_a_run(make_run: MakeRun, tmp_path: Path, missing: str) -> None:
    run = make_run("a")
    (run / missing).unlink()
    with pytest.raises(DataError, match=missing):
        build_report([run], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_losses_that_are_no_numbers_are_skipped(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", evaluated=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 200, "val_loss": None}) + "\n")
    last = build_report([run], tmp_path / "out")["runs"][0]["validation_loss"]
    assert last == pytest.approx(4.95 + 4.1 * np.exp(-200 / 45))


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_file_that_is_no_text(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    run = make_run("a")
    (run / name).write_bytes(b"a: 1\n\xff" + (run / name).read_bytes())
    with pytest.raises(DataError, match=rf"{name}: damaged: byte 0xff at 5"):
        build_report([run], tmp_path / "out")


def test_a_configuration_without_what_the_report_needs(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    (run / "config.yaml").write_text("model: {}\ntrain: {}\n")
    with pytest.raises(DataError, match=r"config.yaml: .*model.embedding.kind is missing"):
        build_report([run], tmp_path / "out")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Told before a run is read: this one is not even there."""
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file/deep"):
        with pytest.raises(DataError, match=r"cannot write to .*file is not a folder"):
            build_report([tmp_path / "nowhere"], out)
    (tmp_path / "out/report.html").mkdir(parents=True)
    with pytest.raises(DataError, match=r"report.html: it is a folder"):
        build_report([tmp_path / "nowhere"], tmp_path / "out")


def test_damaged_evaluation(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    file = next(run.glob("evaluation/*/perplexity.json"))
    for text in ('{"nats_per_token": 5', "{}", '{"nats_per_token": null}'):
        file.write_text(text)
        with pytest.raises(DataError, match=r"perplexity\.json: damaged"):
            build_report([run], tmp_path / "out")


def test_needs_no_torch() -> None:
    code = "import sys, leviathan.analysis.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
