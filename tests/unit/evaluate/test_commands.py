"""The evaluation commands as used in scripts, and the report on their results."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from errors import raises_error

from leviathan.data.format import DatasetInfo
from leviathan.evaluate.perplexity import perplexity
from leviathan.report.report import build_report

PLOT_ENDS = ("svg", "png")


def leviathan(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leviathan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_from_commands_to_the_report(
    make_run: Callable[..., Path], tiny_dataset: Path, tmp_path: Path
) -> None:
    runs = [make_run(tiny_dataset, kind, kind) for kind in ("tied", "leviathan")]
    item = {"context": "import re\n", "choices": ["import json", "pass"], "answer": 0}
    (tmp_path / "choices.jsonl").write_text(f"{json.dumps(item)}\n" * 4)
    evaluation = ("--tasks", "next_line", "--task-data", tmp_path, "--json")
    for run in runs:
        (run / "metrics.jsonl").write_text('{"step": 20, "loss": 6.5, "tokens_per_s": 100.0}\n')
        for command in (("perplexity", run, tiny_dataset, "--json"), ("eval", run, *evaluation)):
            done = leviathan(*command)
            assert done.returncode == 0, done.stderr
            json.loads(done.stdout)  # one object on standard output and nothing else
    strata = tmp_path / "strata"
    done = leviathan("frequency", *runs, "--data", tiny_dataset, "--out", strata, "--json")
    pairs = json.loads(done.stdout)["pairs"]
    plots = {f"frequency_{name}.{end}" for name in ("absolute", "relative") for end in PLOT_ENDS}
    assert {file.name for file in strata.iterdir()} == {"frequency.json"} | plots
    report = build_report(runs, tmp_path / "out")
    (group,) = report["groups"]
    assert group["pairing"]["paired"], group["pairing"]
    assert group["frequency"]["pairs"][0]["all"] == pairs[0]["all"]
    gap = group["arms"][1]["relative"]["validation_nats"]
    assert gap == pytest.approx(pairs[0]["all"]["difference"], rel=1e-6)
    assert [arm["samples"] for arm in group["tasks"][0]["arms"]] == [4, 4]
    assert all(arm["parameters"]["total"] > 0 for arm in group["arms"])


def test_data_of_another_tokenizer(
    make_run: Callable[..., Path], tiny_dataset: Path, tmp_path: Path
) -> None:
    run = make_run(tiny_dataset)
    other = tmp_path / "other"
    shutil.copytree(tiny_dataset, other)
    description, meta = other / "dataset.json", other / "tokenizer.meta.json"
    old = DatasetInfo.load(other).tokenizer.fingerprint
    for file in (description, meta):
        file.write_text(file.read_text().replace(old, "0" * 64))
    assert DatasetInfo.load(other).tokenizer.fingerprint == "0" * 64
    with raises_error("evaluate.other_tokenizer", other, run):
        perplexity(run, other)


def test_damaged_checkpoint(make_run: Callable[..., Path], tiny_dataset: Path) -> None:
    run = make_run(tiny_dataset)
    part = next((run / "checkpoints" / "step-00000020").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-100])
    with raises_error("checkpoint.corrupt", part.name):
        perplexity(part.parent, tiny_dataset)
    with raises_error("checkpoint.all_corrupt", run):
        perplexity(run, tiny_dataset)
    assert not (run / "evaluation").exists()
