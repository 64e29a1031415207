"""The commands of docs/checkpoints.md, run run in order."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documentation import runnable
from runs import (
    LAUNCHERS,
    PATIENCE_S,
    REPOSITORY,
    STEPS,
    curve,
    finish,
    launched,
    signal_when_at,
)

from leviathan.checkpoint.store import load_model
from leviathan.parallel.launch_env import free_port

COMMANDS = [shlex.split(line) for line in runnable("docs/checkpoints.md")]
# fp32 sums in another order over 40 steps at a learning rate of 0.01; seen: 2e-5 relative.
LOSS_TOLERANCE = 1e-3


def start(words, folder):
    """The process of a command, in `folder`."""
    program, *rest = words
    command = ["-m", "leviathan", *rest]
    if program in LAUNCHERS:
        module, *_, port = LAUNCHERS[program]
        command = ["-m", module, port, str(free_port()), *rest]
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.heavy
def test_a_run_moves_by_the_commands_of_the_documentation(run_file, tmp_path):
    run = yaml.safe_load(run_file.read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**run, "run_dir": "run"}))
    (tmp_path / "launch").symlink_to(REPOSITORY / "launch")
    training = [c for c in COMMANDS if "run.yaml" in c and "init_from=run" not in c]
    assert len(training) == 5
    for number, words in enumerate(training):
        process = start(words, tmp_path)
        if number < len(training) - 1:
            signal_when_at(tmp_path / "run", STEPS * (number + 1) // 5, signal.SIGTERM)
        status, errors = finish(process)
        assert status == 0, (words, errors)
        assert ("Resuming from" in errors) == (number > 0), errors
    for words in COMMANDS:
        if words not in training:
            process = start(words, tmp_path)
            out, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, (words, out, errors)

    alone = run_file.parent / "undisturbed-alone"
    with launched("alone", run_file, f"run_dir={alone}", "engine.kind=fsdp2") as process:
        status, errors = finish(process)
    assert status == 0, errors
    expected, found = curve(alone), curve(tmp_path / "run")
    assert found.keys() == expected.keys()
    assert {k: v for k, v in found.items() if k[1] in ("tokens", "lr")} == {
        k: v for k, v in expected.items() if k[1] in ("tokens", "lr")
    }
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert load_model(tmp_path / "second")[2]["step"] == STEPS
    assert load_model(Path(tmp_path / "run"))[2]["step"] == STEPS
