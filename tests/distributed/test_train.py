"""Whole runs through the DeepSpeed launcher: stopped, resumed, finished, and refused."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from runs import (
    PATIENCE_S,
    REPOSITORY,
    STEPS,
    curve,
    finish,
    gone,
    launched,
    lines,
    signal_when_at,
)

from leviathan.checkpoint.store import load_model


def test_interrupted_and_resumed_equals_undisturbed(run_file):
    undisturbed, disturbed = run_file.parent / "undisturbed", run_file.parent / "disturbed"
    profiled = (f"run_dir={undisturbed}", "--profile", "steps=3-4")
    with launched("torchrun", run_file, *profiled) as process:
        status, errors = finish(process)
    assert status == 0, errors
    assert "Warning" not in errors
    assert errors.count("matrix products: ") == 1
    assert (undisturbed / "profile" / "steps-3-4" / "operators.csv").exists()
    assert "validation loss" in errors
    steps = [line["step"] for line in lines(undisturbed) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))
    logged = [line for line in lines(undisturbed) if "loss" in line]
    timed = [line for line in logged if "profiled_steps" not in line]
    assert [line["step"] for line in logged if line not in timed] == [3, 4]
    assert {line["slowest_rank"] for line in timed} <= {0, 1}
    assert all(line["forward_s"]["fastest"] <= line["forward_s"]["slowest"] for line in timed)

    with launched("deepspeed", run_file, f"run_dir={disturbed}") as process:
        ranks = signal_when_at(disturbed, 12, signal.SIGTERM)
        status, errors = finish(process)
    assert status == 0, errors
    assert "Received SIGTERM: checkpoint saved at step" in errors
    assert all(gone(pid) for pid in ranks)
    stopped_at = max(line["step"] for line in lines(disturbed))
    assert 12 <= stopped_at < STEPS

    # A killed save, a corrupt latest checkpoint, and lines of steps that will be repeated.
    checkpoints = disturbed / "checkpoints"
    (checkpoints / ".saving-step-00000099").mkdir()
    (checkpoints / "step-00000099").mkdir()
    newest = checkpoints / f"step-{stopped_at:08d}"
    tensors = newest / "__0_0.distcp"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with launched("deepspeed", run_file, f"run_dir={disturbed}") as process:
        status, errors = finish(process)
    assert status == 0, errors
    assert f"Skipping a corrupt checkpoint: {tensors}" in errors
    assert "Resuming from" in errors
    assert "step-00000010" in errors

    assert curve(disturbed) == curve(undisturbed)
    one, config, state = load_model(disturbed)
    other, _, _ = load_model(undisturbed / "checkpoints" / "latest")
    assert config.train.steps == state["step"] == STEPS
    assert state["tokens"] == lines(disturbed)[-2]["tokens"]
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    names = [path.name for path in sorted(checkpoints.iterdir())]
    kept = ["step-00000020", "step-00000030", "step-00000040"]
    assert names == [f"corrupt-{newest.name}", "corrupt-step-00000099", *kept]


def test_a_finished_run_is_left_alone_and_another_one_refused(run_file):
    """Uses the run of the previous test."""
    run_dir = run_file.parent / "undisturbed"
    if not run_dir.exists():
        pytest.skip("needs the run of the test before")
    before = (run_dir / "metrics.jsonl").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "leviathan", "train", str(run_file), f"run_dir={run_dir}"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "already complete at step 40" in done.stderr

    other = (f"run_dir={run_dir}", "optim.lr=0.02", "train.steps=50", "train.log_every=7")
    with launched("deepspeed", run_file, *other) as process:
        status, errors = finish(process)
    assert status == 2
    assert errors.count("error:") == 1, errors  # two ranks, one message
    assert "optim.lr: 0.01 in the existing run, 0.02 now" in errors
    assert "train.steps: 40 in the existing run, 50 now" in errors
    assert "log_every" not in errors
    assert "Traceback" not in errors
    assert (run_dir / "metrics.jsonl").read_bytes() == before
