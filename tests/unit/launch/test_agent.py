"""The agent at the other end, and the waiting at this one, with small processes for ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leviathan.launch import agent, start
from leviathan.launch.commands import Command
from leviathan.launch.hosts import Host

PATIENCE_S = 60

# A launcher that starts a rank in a session of its own, as torchrun does, and heeds no signal.
LAUNCHER = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True,
                        env={**os.environ, "RANK": "0"})
print("started", rank.pid, flush=True)
sys.exit(rank.wait() if len(sys.argv) < 3 else int(sys.argv[2]))
"""
# A rank that exits with status 0 on SIGTERM.
RANK = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: sys.exit(0))
print("ready", flush=True)
time.sleep(600)
"""


def begin(*argv, cwd="/", **environment):
    process = subprocess.Popen(
        [sys.executable, agent.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    spec = {"argv": [sys.executable, *argv], "cwd": str(cwd), "environment": environment}
    process.stdin.write(json.dumps(spec) + "\n")
    process.stdin.flush()
    return process


def ready(process):
    """The rank's process id, once it listens."""
    words = [process.stdout.readline().split() for _ in range(2)]
    assert ["ready"] in words
    return int(next(word[1] for word in words if word[0] == "started"))


def gone(pid):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_runs_a_command_where_and_as_it_is_told(tmp_path):
    show = "import os, sys; print(os.getcwd(), os.environ['A'], sys.argv[1]); sys.exit(7)"
    process = begin("-c", show, "a b$(c)'", cwd=tmp_path, A="x y")
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out == f"{tmp_path} x y a b$(c)'\n"
    assert process.returncode == 7


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_is_for_the_ranks(name):
    process = begin("-c", LAUNCHER, RANK)
    rank = ready(process)
    process.stdin.write(f"nonsense\n{name}\n")
    process.stdin.flush()
    assert process.wait(PATIENCE_S) == 0
    assert gone(rank)


def test_ranks_are_told_to_save_when_nobody_is_at_the_other_end():
    process = begin("-c", LAUNCHER, RANK)
    rank = ready(process)
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
    assert gone(rank)


def test_what_a_launcher_leaves_behind_is_ended():
    process = begin("-c", LAUNCHER, "import time; time.sleep(600)", "3")
    rank = int(process.stdout.readline().split()[1])
    assert process.wait(PATIENCE_S) == 3
    assert gone(rank)


def run(*codes, elastic=False, grace_period_s=1.0):
    """Exit status of a launch on two 'hosts'; each of `codes` may be with arguments."""
    hosts = (Host("localhost", 1), Host("127.0.0.1", 1))
    commands = [
        Command((sys.executable, "-c", *([code] if isinstance(code, str) else code)), host)
        for code, host in zip(codes, hosts, strict=True)
    ]
    return start.run_everywhere(commands, elastic, grace_period_s)


WAIT = "import time; time.sleep({})"


def test_the_first_failure_is_the_status_and_the_others_are_waited_for():
    assert run("pass", "pass") == 0
    assert run("raise SystemExit(4)", WAIT.format(0.5)) == 4


def test_who_does_not_end_after_another_has_failed_is_ended():
    started = time.monotonic()
    assert run("raise SystemExit(4)", [LAUNCHER, RANK]) == 4  # the rank would wait forever
    assert time.monotonic() - started < PATIENCE_S


def test_elastic_goes_on_without_a_host_that_fails():
    assert run("raise SystemExit(4)", WAIT.format(3), elastic=True) == 0
    assert run(WAIT.format(0), "import time; time.sleep(3); raise SystemExit(5)", elastic=True) == 5


def test_the_launcher_passes_its_own_signals_on():
    """As its own process, for it takes signals."""
    code = f"""
import sys
from leviathan.launch.commands import Command
from leviathan.launch.hosts import Host
from leviathan.launch.start import run_everywhere
command = Command((sys.executable, "-c", {LAUNCHER!r}, {RANK!r}), Host("localhost", 1))
sys.exit(run_everywhere([command], False, 60))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(start.__file__).parents[2])},
    )
    rank = ready(process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(PATIENCE_S) == 0
    assert gone(rank)
