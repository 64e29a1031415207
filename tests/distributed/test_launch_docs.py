"""The commands of launch/README.md, run in order on two hosts."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import yaml
from documentation import runnable
from runs import PATIENCE_S, REPOSITORY, curve, finish, launched, lines
from two_hosts import TwoHosts, missing

from leviathan.parallel.launch_env import free_port

COMMANDS = [shlex.split(line) for line in runnable("launch/README.md")]
MODULES = {
    "leviathan": "leviathan",
    "deepspeed": "deepspeed.launcher.runner",
    "torchrun": "torch.distributed.run",
}
SHOWING = {"params", "check", "--dry-run", "--probe"}
TRAINING = [words for words in COMMANDS if not SHOWING & set(words)]
EACH = 5  # steps per command before SIGTERM
STEPS = EACH * len(TRAINING)
LOSS_TOLERANCE = 1e-3  # as in test_docs


def test_the_commands_that_show_something_show_it(run_file, tmp_path):
    """The others are in the heavy test below; Slurm's script is run by test_slurm."""
    prepare(run_file, tmp_path)
    shown = [words for words in COMMANDS if SHOWING & set(words)]
    assert len(shown) == 6
    for words in shown:
        # The usual port may be taken while tests run.
        port = ["--port", str(free_port())] if {"check", "--probe"} & set(words) else []
        done = subprocess.run(
            [sys.executable, "-m", *words, *port],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr)
        assert len(done.stdout.splitlines()) >= 1, words


def prepare(run_file, folder):
    run = yaml.safe_load(run_file.read_text())
    run |= {"run_dir": "run", "engine": {"kind": "fsdp2"}}
    run["train"] |= {"steps": STEPS, "eval_every": 0, "global_batch_size": 16}
    run["optim"] |= {"lr": 0.001}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "launch").symlink_to(REPOSITORY / "launch")
    (folder / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    (folder / "hostfile1").write_text("node1 slots=1\n")
    (folder / ".deepspeed_env").write_text(
        "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nOMP_WAIT_POLICY=PASSIVE\n"
        "GLOO_SOCKET_IFNAME=eth0\nTP_SOCKET_IFNAME=eth0\n"
    )


def stop_at(folder, step, process, log):
    """SIGUSR1 to one rank once the run has logged that step."""
    deadline = time.monotonic() + PATIENCE_S
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or max((x["step"] for x in lines(folder / "run")), default=0) < step:
        assert process.poll() is None, text_of(log)
        assert time.monotonic() < deadline, text_of(log)
        time.sleep(0.05)
    os.kill(json.loads((folder / "run" / "run.json").read_text())["pid"][-1], signal.SIGUSR1)


def text_of(log):
    log.seek(0)
    return log.read()


@pytest.mark.heavy
@pytest.mark.timeout(3000)
def test_a_run_goes_through_all_launchers_of_the_documentation(run_file, tmp_path):
    if reason := missing():
        pytest.skip(reason)
    prepare(run_file, tmp_path)
    assert len(TRAINING) == 12
    with TwoHosts(tmp_path / "hosts") as hosts:
        for number, (program, *words) in enumerate(TRAINING, start=1):
            log = (tmp_path / f"log-{number}").open("w+")
            process = subprocess.Popen(
                hosts.on("node1", sys.executable, "-m", MODULES[program], *words),
                cwd=tmp_path,
                env=hosts.environment(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1"),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if number < len(TRAINING):
                    stop_at(tmp_path, EACH * number, process, log)
                assert process.wait(PATIENCE_S) == 0, (program, words, text_of(log))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            assert ("Resuming from" in text_of(log)) == (number > 1), (program, words, text_of(log))

    alone = run_file.parent / "undisturbed-launch-docs"
    with launched("alone", tmp_path / "run.yaml", f"run_dir={alone}") as process:
        status, errors = finish(process)
    assert status == 0, errors
    assert curve(tmp_path / "run") == pytest.approx(curve(alone), rel=LOSS_TOLERANCE)
