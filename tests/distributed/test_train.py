"""Whole runs through the DeepSpeed launcher: stopped, resumed, finished, and refused."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import yaml

from leviathan.checkpoint.load import load_model
from leviathan.parallel.launch_env import free_port

REPOSITORY = Path(__file__).parents[2]
STEPS = 40
PATIENCE_S = 240  # a launch takes 20 s on two idle cores, several times that on busy ones


@pytest.fixture(scope="module")
def run_file(tiny_dataset, tmp_path_factory):
    """A run of two ranks on the tiny data set; `run_dir` is given on the command line."""
    folder = tmp_path_factory.mktemp("runs")
    run = {
        "run_dir": str(folder / "run"),
        "data": {"path": str(tiny_dataset), "shuffle_window": 100},
        "model": {
            "d_model": 16,
            "n_layers": 2,
            "n_heads": 2,
            "seq_len": 32,
            "vocab_size": 601,
            "padded_vocab_size": 608,
            "embedding": {"kind": "leviathan", "d_seed": 8, "heads": 2, "knots": 4, "rank": 4},
        },
        "train": {
            "steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "log_every": 1,
            "eval_every": 15,
        },
        "optim": {"lr": 0.01, "warmup_steps": 3},
        "checkpoint": {"every": 10, "keep_last": 3},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


LAUNCHERS = {
    "deepspeed": ["deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port"],
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
}


@contextmanager
def launched(launcher, run_file, *overrides):
    """The launcher's process, its output in pipes; it and its ranks are gone afterwards."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(free_port()), "launch/train.py"]
    process = subprocess.Popen(
        [*command, str(run_file), *overrides],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def finish(process):
    """(exit status, standard error); the deepspeed launcher's own lines go to standard output."""
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve(run_dir):
    """Step → what must not depend on when a run was interrupted."""
    return {
        (line["step"], key): line[key]
        for line in lines(run_dir)
        for key in ("loss", "grad_norm", "lr", "tokens", "val_loss")
        if key in line
    }


def signal_when_at(run_dir, step, number):
    """Sends `number` to one rank once `step` is in metrics.jsonl."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) >= step:
            ranks = json.loads((run_dir / "run.json").read_text())["pid"]
            os.kill(ranks[1], number)
            return ranks
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_interrupted_and_resumed_equals_undisturbed(run_file):
    undisturbed, disturbed = run_file.parent / "undisturbed", run_file.parent / "disturbed"
    with launched("torchrun", run_file, f"run_dir={undisturbed}") as process:
        status, errors = finish(process)
    assert status == 0, errors
    assert "Warning" not in errors
    assert "validation loss" in errors
    steps = [line["step"] for line in lines(undisturbed) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))

    with launched("deepspeed", run_file, f"run_dir={disturbed}") as process:
        ranks = signal_when_at(disturbed, 12, signal.SIGTERM)
        status, errors = finish(process)
    assert status == 0, errors
    assert "Told to stop: saved after step" in errors
    assert all(gone(pid) for pid in ranks)
    stopped_at = max(line["step"] for line in lines(disturbed))
    assert 12 <= stopped_at < STEPS

    # A killed save, a damaged newest checkpoint, and lines of steps that will be done anew.
    checkpoints = disturbed / "checkpoints"
    (checkpoints / ".saving-step-00000099").mkdir()
    (checkpoints / "step-00000099").mkdir()
    newest = checkpoints / f"step-{stopped_at:08d}"
    tensors = newest / "__0_0.distcp"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with launched("deepspeed", run_file, f"run_dir={disturbed}") as process:
        status, errors = finish(process)
    assert status == 0, errors
    assert f"Skipping a damaged checkpoint: {tensors}" in errors
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
    assert names == [f"damaged-{newest.name}", "damaged-step-00000099", *kept]


def test_a_finished_run_is_left_alone_and_another_one_refused(run_file):
    """On what the test above has left."""
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
    assert "complete after 40 steps, nothing to do" in done.stderr

    other = (f"run_dir={run_dir}", "optim.lr=0.02", "train.steps=50", "train.log_every=7")
    with launched("deepspeed", run_file, *other) as process:
        status, errors = finish(process)
    assert status == 2
    assert errors.count("error:") == 1, errors  # two ranks, one message
    assert "optim.lr: 0.01 in the run so far, 0.02 now" in errors
    assert "train.steps: 40 in the run so far, 50 now" in errors
    assert "log_every" not in errors
    assert "Traceback" not in errors
    assert (run_dir / "metrics.jsonl").read_bytes() == before
