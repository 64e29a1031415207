"""launch/train.sbatch as bash runs it, with stand-ins for Slurm's three programs: none runs here.

They do what the manuals say of them: srun starts the tasks with SLURM_* set and passes signals on,
scontrol requeue runs the script again.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from runs import PATIENCE_S, REPOSITORY, STEPS, curve, finish, launched, lines, signal_when_at

pytestmark = pytest.mark.heavy

SBATCH = """#!/bin/bash
# sbatch --nodes N --ntasks-per-node M SCRIPT ARGS
echo "$@" > submitted
tasks=$4; shift 4
SLURM_JOB_ID=17 TASKS=$tasks exec bash "$@"
"""
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=1
trap 'kill -USR1 "${ranks[@]}"' USR1
for number in $(seq 0 $((TASKS - 1))); do
  SLURM_PROCID=$number SLURM_LOCALID=$number SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_NUM_NODES=1 \\
    SLURM_STEP_NODELIST=localhost SLURM_STEP_ID=0 "$@" &
  ranks+=($!)
done
status=0
for rank in "${ranks[@]}"; do
  while kill -0 "$rank" 2>/dev/null; do wait "$rank"; last=$?; done
  [ "$last" = 0 ] || status=$last
done
exit $status
"""
SCONTROL = """#!/bin/bash
echo "$@" >> requeued
"""


def test_a_job_saves_before_its_limit_and_queues_again(run_file, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "launch").symlink_to(REPOSITORY / "launch")
    run_dir = tmp_path / "run"
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "leviathan", "launch", str(run_file), f"run_dir={run_dir}"]
    words += ["--launcher", "slurm", "--ranks", "2"]

    def submit():
        return subprocess.Popen(
            words,
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    job = submit()  # becomes sbatch, and that the script
    deadline = time.monotonic() + PATIENCE_S
    while not (run_dir / "metrics.jsonl").exists() or len(lines(run_dir)) < 12:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGUSR1)  # the signal of --signal=B:USR1@300
    status, errors = finish(job)
    assert status == 0, errors
    assert ": checkpoint saved at step" in errors
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert (tmp_path / "submitted").read_text().startswith("--nodes 1 --ntasks-per-node 2 ")

    status, errors = finish(submit())
    assert status == 0, errors
    assert "Resuming from" in errors
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"  # complete: not once more

    undisturbed = run_file.parent / "undisturbed-slurm"
    with launched("torchrun", run_file, f"run_dir={undisturbed}") as process:
        status, errors = finish(process)
    assert status == 0, errors
    assert curve(run_dir) == curve(undisturbed)
    assert max(line["step"] for line in lines(run_dir)) == STEPS


def test_a_rank_that_dies_ends_the_job_without_a_requeue(run_file, tmp_path):
    """The script's exit status is srun's; the stand-in does not end the step, the watch does."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    run_dir = tmp_path / "run"
    job = subprocess.Popen(
        ["bash", "launch/train.sbatch", str(run_file), f"run_dir={run_dir}", "train.steps=20000"],
        cwd=REPOSITORY,
        env=os.environ
        | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY),
            "SLURM_JOB_ID": "18",
            "TASKS": "2",
        },
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal_when_at(run_dir, 12, signal.SIGKILL)
    status, errors = finish(job)
    assert status != 0
    assert "rank 1 on" in errors
    assert not (REPOSITORY / "requeued").exists()
