"""`leviathan check --probe` on two ranks, one of which is slow for real."""

import json
import os
import subprocess
import sys

import pytest
from ranks import run_ranks
from runs import PATIENCE_S, REPOSITORY

from leviathan.config.load import load_config
from leviathan.config.run import RunConfig
from leviathan.parallel.launch_env import free_port, read_launch_env
from leviathan.parallel.mesh import init_mesh, leave_mesh
from leviathan.preflight.checks import Report
from leviathan.preflight.probe import time_compute


def timed(run_file, core):
    """Results of the ranks on one core, of which rank 1 gets a ninth."""
    mesh, report = init_mesh(read_launch_env(), tp=1), Report()
    os.sched_setaffinity(0, {core})
    os.nice(10 * mesh.rank)
    time_compute(report, load_config(run_file, [], RunConfig), mesh)
    leave_mesh()
    return report.as_dict()


def test_a_rank_that_gets_less_of_its_core_is_named(run_file):
    first, second = run_ranks(timed, 2, str(run_file), min(os.sched_getaffinity(0)))
    assert first == second
    assert first["slow_ranks"] == [1]
    (row,) = first["findings"]
    assert (row["subject"], row["level"]) == ("compute", "warning")
    assert "rank 1 takes" in row["message"]
    assert "rank 0" not in row["message"]


def test_under_a_launcher(run_file, tmp_path):
    module, options = "torch.distributed.run", ["--nproc-per-node", "2", "--master-port"]
    command = [sys.executable, "-m", module, *options, str(free_port()), "launch/train.py"]
    done = subprocess.run(
        [*command, str(run_file), f"run_dir={tmp_path / 'run'}", "--probe", "--json"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # of rank 0 only
    found = json.loads(line)
    assert len(found["losses"]) == 2
    assert found["losses"][0] == pytest.approx(6.4, abs=0.2)  # ln 601
    assert len(found["compute_s"]) == 2
    assert found["bandwidth_bytes_per_s"] > 1e6
    assert found["save"]["bytes"] > 12 * 1000
    assert {row["subject"] for row in found["findings"]} == {
        "compute",
        "bandwidth",
        "steps",
        "save",
    }
    # No files are left, and the directory of the run was not used.
    assert list(tmp_path.iterdir()) == []
