"""A tiny experiment: trained, evaluated and reported; a second call does nothing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from errors import raises_error

from leviathan.checkpoint.layout import complete_checkpoints
from leviathan.config.data import PrepConfig
from leviathan.data.prepare import prepare
from leviathan.experiments.execute import run_experiment
from leviathan.experiments.expand import load_experiment
from leviathan.report.report import build_report

SMALL = Path(__file__).parents[3] / "configs" / "run" / "small.yaml"


def tiny(tmp_path: Path, dataset: Path, arms: dict) -> Path:
    path = tmp_path / "experiment.yaml"
    experiment = {
        "title": "Tiny",
        "question": "Does it run?",
        "out": str(tmp_path / "out"),
        "run": str(SMALL),
        "baseline": "tied",
        "set": {
            "data.path": str(dataset),
            "model": {"d_model": 16, "n_layers": 1, "n_heads": 2, "seq_len": 32},
            "model.vocab_size": 601,
            "model.padded_vocab_size": 640,
            "train": {"steps": 4, "global_batch_size": 4, "micro_batch_size": 4, "log_every": 1},
            "train.eval_every": 2,
            "optim.warmup_steps": 1,
        },
        "arms": arms,
    }
    path.write_text(yaml.safe_dump(experiment, sort_keys=False))
    return path


@pytest.mark.heavy
def test_run_resume_and_report(tmp_path: Path, tiny_dataset: Path, capsys) -> None:
    arms = {
        "tied": {"model.embedding.kind": "tied"},
        "codes": {"model.embedding.kind": "binary_codes"},
    }
    path = tiny(tmp_path, tiny_dataset, arms)
    plan = run_experiment(load_experiment(path))
    messages = capsys.readouterr().err
    assert "1/2 tied-s1234: 4/4 validation loss" in messages
    assert plan["left"]["runs"] == 0
    for run in plan["runs"]:
        evaluation = Path(run["run_dir"]) / "evaluation" / "step-00000004"
        assert (evaluation / "frequency.npz").exists()
        described = json.loads((Path(run["run_dir"]) / "run.json").read_text())
        assert described["parameters"]["total"] == run["parameters"]["total"]
        assert described["machine"]
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").rglob("metrics.jsonl")}
    run_experiment(load_experiment(path))
    assert "2/2 codes-s1234: complete, validation loss" in capsys.readouterr().err
    assert before == {f: f.stat().st_mtime_ns for f in before}
    report = build_report([path], tmp_path / "report")
    (group,) = report["groups"]
    assert group["arms"][1]["relative"]["validation_nats"] is not None
    assert report["question"] == "Does it run?"
    assert [pair["label"] for pair in group["frequency"]["pairs"]] == ["codes"]


def test_one_failure_keeps_no_other_run_from_being_done(tmp_path: Path, tiny_dataset: Path) -> None:
    arms = {"tied": {"model.embedding.kind": "tied", "data.path": str(tmp_path / "nowhere")}}
    path = tiny(tmp_path, tiny_dataset, arms | {"codes": {"model.embedding.kind": "binary_codes"}})
    with raises_error("experiment.runs_failed", "tied-s1234", "dataset.not_found"):
        run_experiment(load_experiment(path))
    assert load_experiment(path).runs[1].is_complete


def test_sigterm_ends_the_run_that_is_being_trained_too(tmp_path: Path, tiny_dataset: Path) -> None:
    """It saves and leaves the run free: the same command continues at once."""
    arms = {"tied": {"model.embedding.kind": "tied", "train.steps": 100_000}}
    path = tiny(tmp_path, tiny_dataset, arms)
    command = [sys.executable, "-m", "leviathan", "experiment", "run", str(path)]
    (run,) = load_experiment(path).runs
    with subprocess.Popen(command, stderr=subprocess.PIPE) as experiment:
        deadline = time.monotonic() + 120
        metrics = run.config.run_dir / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.2)
        experiment.send_signal(signal.SIGTERM)
        experiment.communicate(timeout=60)
    assert experiment.returncode == 128 + signal.SIGTERM
    assert complete_checkpoints(run.config.run_dir)
    assert "saved" in next((tmp_path / "out" / "configs").glob("*.log")).read_text().lower()


def test_a_data_set_without_validation_is_refused_before_training(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    data, text = tmp_path / "data", tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "def f(x): return x\n" * 200}) + "\n")
    prepare(
        PrepConfig.model_validate(
            {"source": {"paths": [str(text)]}, "tokenizer": str(tiny_tokenizer)}
            | {"seq_len": 32, "out": str(data)}
        )
    )
    experiment = load_experiment(tiny(tmp_path, data, {"tied": {"model.embedding.kind": "tied"}}))
    with raises_error("dataset.no_split", "evaluate.frequency=false"):
        run_experiment(experiment)
    assert not experiment.runs[0].config.run_dir.exists()
