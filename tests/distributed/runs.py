"""Shared by the tests of complete runs: a launched run, its log, and waiting for it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from leviathan.parallel.launch_env import free_port

REPOSITORY = Path(__file__).parents[2]
STEPS = 40
PATIENCE_S = 240  # a launch takes 20 s on two idle cores, several times that on busy ones

LAUNCHERS = {
    "deepspeed": ["deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port"],
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
}


@contextmanager
def launched(launcher, run_file, *overrides, prefix=()):
    """The launcher's process, its output in pipes; it and its ranks are gone afterwards.

    `prefix` comes before the command: another program that runs it.
    """
    command = [sys.executable, "-m", "leviathan", "train"]
    if launcher != "alone":
        command = [sys.executable, "-m", *LAUNCHERS[launcher], str(free_port()), "launch/train.py"]
    process = subprocess.Popen(
        [*prefix, *command, str(run_file), *overrides],
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
    """Step → values that must not depend on interruptions of a run."""
    return {
        (line["step"], key): line[key]
        for line in lines(run_dir)
        for key in ("loss", "grad_norm", "lr", "tokens", "val_loss")
        if key in line
    }


def signal_when_at(run_dir, step, number, rank=1):
    """Sends `number` to one rank once `step` is in metrics.jsonl; the ids of all."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and len(lines(run_dir)) >= step:
            ranks = json.loads((run_dir / "run.json").read_text())["pid"]
            os.kill(ranks[rank], number)
            return ranks
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
