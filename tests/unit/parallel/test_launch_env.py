import os
import socket
import subprocess
import sys

import pytest
from errors import raises_error

from leviathan.parallel.launch_env import LaunchEnv, read_launch_env
from leviathan.parallel.mesh import init_mesh
from leviathan.train.signals import launcher_processes


def test_alone_is_a_world_of_one():
    environ = {}
    assert read_launch_env(environ) == LaunchEnv(0, 0, 1, 1)
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert 0 < int(environ["MASTER_PORT"]) < 65536


COMMON = {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}


def test_deepspeed_and_torchrun_name_the_local_ranks_differently():
    deepspeed = {**COMMON, "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    torchrun = {**COMMON, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_launch_env(deepspeed) == read_launch_env(torchrun) == LaunchEnv(3, 1, 4, 2)


def test_half_a_launcher_is_an_error():
    with raises_error("launch_env.incomplete", "MASTER_ADDR", "MASTER_PORT"):
        read_launch_env({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("RANK", "abc"), ("RANK", "4"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "99999")],
        *[("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "many")],
    ],
)
def test_a_variable_without_sense_is_named(name, value):
    with raises_error("launch_env.invalid", f"{name}={value}"):
        read_launch_env({**COMMON, name: value})


STEP = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
STEP |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[007-008]", "gpu007"), ("a1,b2", "a1"), ("n[3,5]-ib,x", "n3-ib"), ("one", "one")],
)
def test_srun_s_tasks_are_ranks(nodes, first):
    environ = {**STEP, "SLURM_STEP_NODELIST": nodes}
    other = {**environ, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_launch_env(environ) == LaunchEnv(3, 1, 4, 2)
    assert read_launch_env(other) == LaunchEnv(0, 0, 4, 2)
    assert environ["MASTER_ADDR"] == first
    assert environ["MASTER_PORT"] == other["MASTER_PORT"]


def test_an_allocation_is_no_launcher_and_half_a_step_is_refused():
    assert read_launch_env({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}).world_size == 1
    with raises_error("launch_env.incomplete", "SLURM_STEP_NODELIST"):
        read_launch_env(dict(STEP))


def test_an_unreachable_world_is_one_message(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {**COMMON, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "0")
        with raises_error("parallel.unreachable", "0", "4", f"127.0.0.1:{port}"):
            init_mesh(read_launch_env(), tp=1)


# A launcher that starts a launcher that starts a rank; the outermost one is killed.
FAMILY = """
import os, sys, time
from leviathan.train.signals import launcher_processes
outer = os.getpid()
if os.fork() == 0:
    if os.fork() == 0:
        before = launcher_processes()
        print(before[1:] == (outer,), flush=True)
        os.kill(outer, 9)
        deadline = time.monotonic() + 30
        while launcher_processes() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        print(launcher_processes() != before, flush=True)
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
"""


def test_a_rank_notices_that_the_deepspeed_command_is_gone():
    done = subprocess.run(
        [sys.executable, "-c", FAMILY],
        env={**os.environ, "LOCAL_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert launcher_processes({}) == ()
    assert launcher_processes({"TORCHELASTIC_RUN_ID": "x"}) == (os.getppid(),)
