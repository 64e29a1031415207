"""The report from run directories: numbers, errors, and no external resources."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from errors import raises_error
from scipy import stats

from leviathan.report.compare import compare
from leviathan.report.fit import read_loss_table
from leviathan.report.html import downstream
from leviathan.report.report import build_report
from leviathan.report.tables import terminal_table

MakeRun = Any


@pytest.fixture
def pair(make_run: MakeRun) -> list[Path]:
    return [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04)]


def test_numbers(pair: list[Path], tmp_path: Path) -> None:
    report = build_report(pair, tmp_path / "out")
    (group,) = report["groups"]
    tied, leviathan = group["arms"]
    assert group["pairing"]["paired"]
    assert tied["validation_loss"] == 5.0
    assert leviathan["perplexity"] == pytest.approx(np.exp(4.96))
    relative = leviathan["relative"]
    assert relative["validation_nats"] == pytest.approx(-0.04)
    assert relative["loss_gain_percent"] == pytest.approx(100 * 0.04 / 5)
    assert relative["perplexity_percent"] == pytest.approx(100 * (np.exp(-0.04) - 1))
    assert relative["speed_percent"] == pytest.approx(100 * (7_500 / 9_000 - 1))
    assert relative["parameters"] == 2_137_344 - 2_105_728
    assert relative["seeds"]["low"] is None  # one seed has no interval
    assert tied["train_seconds"] == pytest.approx(200 * 16 * 256 / 9_000)
    assert tied["flops"] == 12_000_000 * 200 * 16 * 256
    assert "relative" not in tied
    last_tenth = [loss for step, loss in steps(report, 0) if step > 180]
    assert tied["train_loss"] == pytest.approx(np.mean(last_tenth))
    (task,) = group["tasks"]
    assert (task["task"], task["metric"]) == ("next_line", "acc")
    assert task["arms"][1] == {
        "label": "leviathan", "value": pytest.approx(0.45), "stderr": 0.049, "samples": 100,
        "seeds": 1, "difference": pytest.approx(0.04), "sigmas": pytest.approx(0.577, abs=1e-3),
    }  # fmt: skip


def steps(report: dict[str, Any], arm: int) -> list[tuple[int, float]]:
    curve = report["groups"][0]["curves"][arm]["train"]
    per_step = 16 * 256
    return [
        (round(at / per_step), loss) for at, loss in zip(curve["at"], curve["mean"], strict=True)
    ]


def test_sample_efficiency(pair: list[Path], tmp_path: Path) -> None:
    """The curves are 4.95 + 4.1·exp(-step/45), and 0.04 less: the crossing has a closed form."""
    relative = build_report(pair, tmp_path / "out")["groups"][0]["arms"][1]["relative"]
    found = relative["efficiency"]
    final = 4.1 * np.exp(-200 / 45)
    exact = -45 * np.log((final + 0.04) / 4.1) * 16 * 256
    assert found["reached"] == 1
    assert found["tokens"] == pytest.approx(exact, rel=0.06)  # interpolated between four points
    assert found["ratio"] == pytest.approx(200 * 16 * 256 / found["tokens"])
    assert found["hours"] == pytest.approx(found["tokens"] / 7_500 / 3600 * 2)
    behind = build_report(pair[::-1], tmp_path / "other")["groups"][0]["arms"][1]["relative"]
    assert behind["efficiency"]["tokens"] is None
    assert 0 < behind["efficiency"]["behind"] < 1


def test_page_holds_the_numbers(pair: list[Path], tmp_path: Path) -> None:
    report = build_report(pair, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    for shown in ("5.0000", "4.9600", "−0.0400", "142.59", "2,137,344", "9,000", "45.0 ± 4.9 %"):
        assert shown in page, shown
    assert "+0.80 %" in page  # the improvement of the loss, as the papers print it
    assert "Some CPU, 2026-11-30" in page  # next to the speed that was measured on it
    assert "which model is better" in page
    assert "does not show which model is better" in report["summary"]
    for key in ("model.embedding.kind", "model.embedding.d_seed"):
        assert key in page
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["runs"] == report["runs"]


def test_page_is_self_contained(pair: list[Path], tmp_path: Path) -> None:
    build_report(pair, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.findall(r"https?:|//[a-z]|<script|<link|<img|@import|url\((?!#)", page)
    assert page.count("<svg") == 4  # two plots, each wide and narrow
    assert "@media print" in page
    ids = re.findall(r' id="([^"]+)"', page)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert used <= set(ids)
    assert all(ids.count(name) == 1 for name in used)


def test_every_plot_and_number_is_a_file(pair: list[Path], tmp_path: Path) -> None:
    report = build_report(pair, tmp_path / "out")
    plots = {path.name for path in (tmp_path / "out" / "plots").iterdir()}
    names = ("curves", "frequency_absolute", "frequency_relative")
    assert plots == {f"{name}.{ending}" for name in names for ending in ("svg", "png")}
    for name in names:
        assert (tmp_path / "out" / "plots" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    files = [Path(file) for file in report["files"]["csv"]]
    tables = {f.name: list(csv.DictReader(f.read_text().splitlines())) for f in files}
    assert {"runs.csv", "arms.csv", "curves.csv", "frequency.csv", "tasks.csv"} == set(tables)
    assert [float(row["loss"]) for row in tables["runs.csv"]] == pytest.approx([5.0, 4.96])
    assert float(tables["arms.csv"][1]["change_loss_gain_percent"]) == pytest.approx(0.8)
    assert len(read_loss_table(tmp_path / "out" / "runs.csv")) == 2  # the input of `leviathan fit`


def test_terminal_table(pair: list[Path], tmp_path: Path) -> None:
    text = terminal_table(build_report(pair, tmp_path / "out"))
    assert re.search(r"Validation loss, nats per token\D+5\.0000\D+4\.9600 +−0\.0400", text)
    assert "which model is better" in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": "07e4" * 16}, "training data"),
        ({"seed": 5}, "data order"),
        ({"steps": 400}, "planned budget"),
        ({"tokenizer": "0123" * 16}, "tokenizer"),
    ],
)
def test_refuses_to_compare(
    make_run: MakeRun, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04, **change)]
    with raises_error("report.not_comparable", named):
        build_report(runs, tmp_path / "out")
    report = build_report(runs, tmp_path / "out", allow_unequal=True)
    (group,) = report["groups"]
    assert group["arms"][1]["relative"]["validation_nats"] == pytest.approx(-0.04)
    assert named in group["arms"][1]["relative"]["unequal"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "--allow-unequal" in page
    assert "not due to the input embedding alone" in page


def test_one_unequal_run_does_not_drop_the_other_pairs(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run("a", "tied"),
        make_run("b", "leviathan", offset=-0.04),
        make_run("c", "untied", offset=-0.3, data="07e4" * 16),
    ]
    report = build_report(runs, tmp_path / "out")
    (group,) = report["groups"]
    assert group["arms"][1]["relative"]["validation_nats"] == pytest.approx(-0.04)
    assert group["arms"][2]["relative"] is None
    assert [row["arm"] for row in group["pairing"]["unequal"]] == ["untied"]
    assert "training data" in group["pairing"]["note"]
    assert [pair["label"] for pair in group["frequency"]["pairs"]] == ["leviathan"]
    assert "−0.3000" not in (tmp_path / "out" / "report.html").read_text()


def test_seeds_are_one_arm(make_run: MakeRun, tmp_path: Path) -> None:
    gains = {1: -0.04, 2: -0.09, 3: 0.01, 4: -0.04}
    runs = [make_run(f"a{seed}", "tied", seed=seed) for seed in gains]
    runs += [make_run(f"b{s}", "leviathan", offset=gain, seed=s) for s, gain in gains.items()]
    report = build_report(runs, tmp_path / "out")
    (group,) = report["groups"]
    assert [arm["seeds"] for arm in group["arms"]] == [[1, 2, 3, 4]] * 2
    seeds = group["arms"][1]["relative"]["seeds"]
    expected = stats.ttest_1samp(list(gains.values()), 0)
    assert seeds["mean"] == pytest.approx(-0.04)
    assert seeds["p"] == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (seeds["low"], seeds["high"]) == pytest.approx((interval.low, interval.high))
    band = group["curves"][1]["difference"]
    assert band["low"][-1] == pytest.approx(-0.09)
    assert band["high"][-1] == pytest.approx(0.01)
    assert "over 4 seeds" in report["summary"]
    assert "which includes zero" in report["summary"]
    assert "Seeds, one by one" in (tmp_path / "out" / "report.html").read_text()


def test_three_seeds_are_too_few_for_an_interval(make_run: MakeRun, tmp_path: Path) -> None:
    gains = {1: -0.04, 2: -0.05, 3: -0.045}
    runs = [make_run(f"a{seed}", "tied", seed=seed) for seed in gains]
    runs += [make_run(f"b{s}", "leviathan", offset=gain, seed=s) for s, gain in gains.items()]
    report = build_report(runs, tmp_path / "out")
    (group,) = report["groups"]
    seeds = group["arms"][1]["relative"]["seeds"]
    assert (seeds["low"], seeds["high"], seeds["p"]) == (None, None, None)
    assert seeds["no_interval"] == "3 seeds; 4 needed"
    assert seeds["std"] == pytest.approx(0.005)
    assert "cludes zero" not in report["summary"]
    for shown in (terminal_table(report), (tmp_path / "out" / "report.html").read_text()):
        assert "3 seeds; 4 needed" in shown
    assert "no_interval" in (tmp_path / "out" / "arms.csv").read_text().splitlines()[0]


CHANGES_NO_RESULT = {
    "tracking": {"wandb": {"project": "p", "name": "NAME"}},
    "train": {"peak_flops": "NUMBER", "spike_threshold_mads": "NUMBER", "log_every": "NUMBER"},
    "model": {"embedding": {"tp_mode": "NAME"}},
    "evaluate": {"every": "NUMBER"},
    "data": {"remote": "NAME", "cache_limit": "NUMBER"},
    "optim": {"max_consecutive_skips": "NUMBER"},
    "engine": {"kind": "NAME"},
}


@pytest.mark.parametrize("section", CHANGES_NO_RESULT)
def test_what_changes_no_result_makes_no_other_arm(section: str, make_run: MakeRun) -> None:
    def changed(path: Path, number: int) -> Path:
        file = path / "config.yaml"
        config = yaml.safe_load(file.read_text())
        text = json.dumps(CHANGES_NO_RESULT[section])
        text = text.replace('"NUMBER"', str(number)).replace("NAME", f"name{number}")
        new = json.loads(text)
        if section == "model":
            config["model"]["embedding"] |= new["embedding"]
        else:
            config[section] = config.get(section, {}) | new
        file.write_text(yaml.safe_dump(config))
        return path

    runs = [changed(make_run(f"a{seed}", "tied", seed=seed), seed) for seed in (1, 2)]
    (group,) = compare(runs)["groups"]
    assert [arm["seeds"] for arm in group["arms"]] == [[1, 2]]
    assert group["arms"][0]["differs_within"] == {
        "engine": ["engine.kind"], "model": ["model.embedding.tp_mode"]
    }.get(section, [])  # fmt: skip


def test_perplexity_of_one_run_alone_does_not_refuse_the_pair(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """Both have a validation loss of the training loop at the same step."""
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04, evaluated=False)]
    report = build_report(runs, tmp_path / "out")
    (group,) = report["groups"]
    loop = 4.95 + 4.1 * np.exp(-200 / 45)
    assert [arm["validation_loss"] for arm in group["arms"]] == pytest.approx([loop, loop - 0.04])
    assert group["arms"][1]["relative"]["validation_nats"] == pytest.approx(-0.04)
    assert "has not scored all runs" in group["loss_note"]
    for shown in (terminal_table(report), (tmp_path / "out" / "report.html").read_text()):
        assert "validation losses of the training loop at step 200" in shown


def test_perplexity_on_two_datasets_falls_back_too(make_run: MakeRun) -> None:
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04)]
    (file,) = (runs[1] / "evaluation").rglob("perplexity.json")
    scored = json.loads(file.read_text())
    scored["data"]["fingerprint"] = "another"
    file.write_text(json.dumps(scored))
    (group,) = compare(runs)["groups"]
    assert "on different data" in group["loss_note"]
    assert group["arms"][1]["relative"]["validation_nats"] == pytest.approx(-0.04)


def test_perplexity_at_two_steps_falls_back_too(make_run: MakeRun) -> None:
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04)]
    folder = runs[1] / "evaluation"
    (folder / "step-00000200").rename(folder / "step-00000150")
    (group,) = compare(runs)["groups"]
    assert "at different steps" in group["loss_note"]
    assert group["arms"][1]["relative"]["validation_nats"] == pytest.approx(-0.04)


def test_frequency_of_one_run_alone_changes_no_pair(make_run: MakeRun) -> None:
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04, evaluated=False)]
    next(runs[0].glob("evaluation/*/perplexity.json")).unlink()
    (group,) = compare(runs)["groups"]
    assert group["loss_note"] == ""
    assert group["arms"][1]["relative"]["validation_nats"] == pytest.approx(-0.04)


def test_the_rate_of_every_arm_and_what_else_differs(make_run: MakeRun) -> None:
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04)]
    for run, lr in zip(runs, (4e-3, 8e-3), strict=True):
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["optim"] = {"lr": lr, "warmup_steps": 10}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    report = compare(runs)
    text = terminal_table(report)
    assert [arm["lr"] for arm in report["groups"][0]["arms"]] == [[4e-3], [8e-3]]
    assert re.search(r"Peak learning rate\D+0\.004\D+0\.008", text)
    assert "model.embedding.kind (tied, leviathan); optim.lr (0.004, 0.008)" in text


def test_the_number_of_comparisons_stands_beside_them(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a", "tied")]
    runs += [make_run(kind, kind, offset=-0.01 * n) for n, kind in enumerate("bcd", start=1)]
    report = build_report(runs, tmp_path / "out")
    (group,) = report["groups"]
    pairs = group["frequency"]["pairs"]
    intervals = sum(row["low"] is not None for pair in pairs for row in pair["absolute"])
    assert group["comparisons"] == {
        "arms": 3, "seeds": 0, "frequency": 2 * intervals, "tasks": 3
    }  # fmt: skip
    assert "3 comparisons, not corrected for multiple comparisons" in report["summary"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{2 * intervals} comparisons, not corrected" in page
    assert "exceed 2 σ by chance" in page


@pytest.mark.parametrize(
    ("samples", "stderr", "reason"),
    [(9, 0.049, "9 samples; 10 needed"), (100, 0.0, "all 100 samples are identical")],
)
def test_no_standard_error_of_few_or_equal_samples(
    make_run: MakeRun, samples: int, stderr: float, reason: str
) -> None:
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04)]
    for run in runs:
        file = next(run.glob("evaluation/*/lm_eval.json"))
        found = json.loads(file.read_text())
        found["results"]["next_line"]["acc_stderr,none"] = stderr
        found["n-samples"]["next_line"]["effective"] = samples
        file.write_text(json.dumps(found))
    (group,) = compare(runs)["groups"]
    (task,) = group["tasks"]
    assert task["arms"][1]["stderr"] is None
    assert "sigmas" not in task["arms"][1]
    assert reason in task["arms"][1]["no_interval"]
    page = downstream(group)
    assert f"no ±: {reason}" in page
    assert "45.0 ±" not in page


def experiment(folder: Path, runs: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    record = {"title": "A title", "question": "A question?", "caution": "No more than that."}
    record |= {"runs": [{"sweep": {}, "seed": 1234, "run_dir": ""} | run for run in runs]}
    (folder / "experiment.json").write_text(json.dumps(record))
    return folder


def test_a_experiment_of_two_groups(make_run: MakeRun, tmp_path: Path) -> None:
    """Each group has its own baseline, so another tokenizer in another group is valid."""
    runs = []
    for group, tokenizer in (("small", "1" * 64), ("large", "2" * 64)):
        for arm, offset in (("tied", 0.0), ("leviathan", -0.04)):
            made = make_run(f"{group}-{arm}", arm, offset=offset, tokenizer=tokenizer)
            place = {"name": f"{group}/{arm}", "group": group, "arm": arm}
            runs.append({**place, "baseline": arm == "tied", "run_dir": str(made)})
    runs.append({"name": "large/x", "group": "large", "arm": "x", "baseline": False})
    folder = experiment(tmp_path / "experiment", runs)
    report = build_report([folder], tmp_path / "out")
    assert [group["name"] for group in report["groups"]] == ["small", "large"]
    for group in report["groups"]:
        assert group["arms"][1]["relative"]["validation_nats"] == pytest.approx(-0.04)
    assert report["missing"] == ["large/x"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "A question?" in page
    assert "All comparisons" in page
    assert "No more than that." in page
    assert (tmp_path / "out" / "plots" / "gains.png").exists()
    ids = re.findall(r' id="([^"]+)"', page)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert all(ids.count(name) == 1 for name in used)


def test_a_sweep_compares_the_best(make_run: MakeRun, tmp_path: Path) -> None:
    losses = {
        "tied": {1e-3: 0.0, 2e-3: -0.1, 4e-3: 0.2},
        "leviathan": {1e-3: 0.3, 2e-3: 0.1, 4e-3: -0.2},
    }
    runs = []
    for arm, points in losses.items():
        for lr, offset in points.items():
            made = make_run(f"{arm}-{lr}", arm, offset=offset)
            place = {"name": f"{arm}-{lr}", "group": "", "arm": arm, "sweep": {"optim.lr": lr}}
            runs.append({**place, "baseline": arm == "tied", "run_dir": str(made)})
    report = build_report([experiment(tmp_path / "experiment", runs)], tmp_path / "out")
    (group,) = report["groups"]
    swept = {arm["label"]: arm for arm in group["sweep"]["arms"]}
    assert swept["tied"]["best"] == 1
    assert not swept["tied"]["at_the_end"]
    assert swept["leviathan"]["at_the_end"]
    assert [arm["swept"] for arm in group["arms"]] == ["lr 0.002", "lr 0.004"]
    assert group["arms"][1]["relative"]["validation_nats"] == pytest.approx(-0.1)
    assert len(report["runs"]) == 6
    page = (tmp_path / "out" / "report.html").read_text()
    assert "is at an end of the tested range" in page
    assert (tmp_path / "out" / "sweep.csv").exists()


def test_the_swept_value_is_not_chosen_on_the_split_that_judges(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """By validation loss 2e-3 would win; by training loss, which does not judge, 1e-3 does."""
    runs = []
    for arm in ("tied", "leviathan"):
        for lr, offset, judged in ((1e-3, -0.1, 0.0), (2e-3, 0.0, -0.3)):
            made = make_run(f"{arm}-{lr}", arm, offset=offset)
            file = next(made.glob("evaluation/*/perplexity.json"))
            values = json.loads(file.read_text()) | {"nats_per_token": 5 + judged}
            file.write_text(json.dumps(values))
            place = {"name": f"{arm}-{lr}", "group": "", "arm": arm, "sweep": {"optim.lr": lr}}
            runs.append({**place, "baseline": arm == "tied", "run_dir": str(made)})
    report = build_report([experiment(tmp_path / "experiment", runs)], tmp_path / "out")
    (group,) = report["groups"]
    assert [arm["swept"] for arm in group["arms"]] == ["lr 0.001"] * 2
    assert [arm["validation_loss"] for arm in group["arms"]] == [5.0] * 2
    assert group["sweep"]["chosen_by"] == "train_loss"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "it is not used to choose their values" in page
    assert "the validation split is not used to choose it" in terminal_table(report)


def test_unevaluated_and_unfinished_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", evaluated=False)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:11]) + '{"step": 60, "lo')
    report = build_report([run], tmp_path / "out")
    assert report["runs"][0]["step"] == 50
    assert report["runs"][0]["validation_loss"] == pytest.approx(4.95 + 4.1 * np.exp(-50 / 45))
    assert report["groups"][0]["frequency"] is None
    assert "50 of 200" in (tmp_path / "out" / "report.html").read_text()


def test_repeated_step_counts_once(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 200, "loss": 4.25, "tokens_per_s": None}) + "\n")
        file.write(json.dumps({"step": 205, "loss": None, "tokens_per_s": 9_000.0}) + "\n")
    report = build_report([run], tmp_path / "out")
    assert steps(report, 0)[-1] == (200, 4.25)  # a step without a loss has no point
    assert report["runs"][0]["train_seconds"] is None


def test_profiled_intervals_count_at_the_speed_of_the_run(make_run: MakeRun) -> None:
    run = make_run("a")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == 100 and "loss" in line:
            line |= {"tokens_per_s": None, "profiled_steps": 5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (arm,) = compare([run])["groups"][0]["arms"]
    assert arm["train_seconds"] == pytest.approx(200 * 16 * 256 / 9_000)


@pytest.mark.parametrize(("busy", "others", "noted"), [(1.0, 0.4, True), (1.0, 0.0, False)])
def test_a_speed_of_an_overloaded_machine_carries_a_note(
    make_run: MakeRun, busy: float, others: float, noted: bool
) -> None:
    runs = [make_run("a", "tied"), make_run("b", "leviathan", offset=-0.04)]
    file = runs[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[::2]:
        line |= {"cpu_busy": busy, "cpu_others": others}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = compare(runs)
    text = terminal_table(report)
    assert ("Measured on an overloaded machine" in text) == noted
    assert ("7,500 *" in text) == noted
    assert "9,000 *" not in text
    assert report["runs"][0]["overloaded"] is None
    assert report["runs"][1]["overloaded"] == (1.0 if noted else 0.0)


def test_two_runs_of_one_kind_are_told_apart(make_run: MakeRun, tmp_path: Path) -> None:
    report = build_report([make_run("first"), make_run("second", offset=0.01)], tmp_path / "out")
    assert [arm["label"] for arm in report["groups"][0]["arms"]] == ["first", "second"]


def test_text_from_files_is_escaped(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("<b>&")
    build_report([run, make_run("other")], tmp_path / "out")
    assert "<b>&amp" not in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("missing", "code"), [("config.yaml", "run.not_found"), ("metrics.jsonl", "metrics.not_found")]
)
def test_not_a_run(make_run: MakeRun, tmp_path: Path, missing: str, code: str) -> None:
    run = make_run("a")
    (run / missing).unlink()
    with raises_error(code, missing):
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
    with raises_error("metrics.corrupt", name, "0xff", "5"):
        build_report([run], tmp_path / "out")


def test_a_configuration_without_what_the_report_needs(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    (run / "config.yaml").write_text("model: {}\ntrain: {}\n")
    with raises_error("run.config_invalid", "config.yaml", "model.embedding.kind"):
        build_report([run], tmp_path / "out")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Reported before a run is read: this one does not exist."""
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file/deep"):
        with raises_error("output.not_writable"):
            build_report([tmp_path / "nowhere"], out)
    (tmp_path / "out/report.html").mkdir(parents=True)
    with raises_error("output.not_writable", "report.html"):
        build_report([tmp_path / "nowhere"], tmp_path / "out")


def test_damaged_evaluation(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    file = next(run.glob("evaluation/*/perplexity.json"))
    for text in ('{"nats_per_token": 5', "{}", '{"nats_per_token": null}'):
        file.write_text(text)
        with raises_error("run.result_corrupt", "perplexity.json"):
            build_report([run], tmp_path / "out")


def test_needs_no_torch() -> None:
    code = "import sys, leviathan.report.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
