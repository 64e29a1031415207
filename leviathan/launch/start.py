"""Starts commands: on this machine, or on all hosts simultaneously over ssh."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from leviathan.console import say
from leviathan.errors import ConfigError
from leviathan.launch.commands import SSH_OPTIONS, Command

# Prefixes of the environment variables passed to every host; `.deepspeed_env` adds others.
EXPORTED = ("PYTHON", "NCCL", "GLOO", "TP_", "OMP_", "DS_", "CUDA_", "TIKTOKEN_", "LEVIATHAN_")
ENVIRONMENT_FILE = ".deepspeed_env"
SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "SIGTERM"}
POLL_S = 0.2


def run_here(command: Command) -> NoReturn:
    """Replaces this process by the command, which then receives its signals.

    Raises:
        ConfigError: the program does not exist.
    """
    environment = {**os.environ, **command.environment}
    sys.stdout.flush()
    try:
        os.execvpe(command.argv[0], command.argv, environment)
    except FileNotFoundError:
        raise ConfigError(
            "launch.no_program", f"{command.argv[0]}: no such program on this machine"
        ) from None


@dataclass
class _Session:
    """The connection to one host's agent."""

    host: str
    process: subprocess.Popen[bytes]

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


def run_everywhere(commands: Sequence[Command], elastic: bool, grace_period_s: float) -> int:
    """Runs each command on its host until all have ended; forwards signals to the ranks.

    Args:
        commands: one per host.
        elastic: whether the remaining hosts continue after one fails; otherwise they are stopped.
        grace_period_s: grace period in seconds for the other hosts to end after the first failure.

    Returns:
        0 if all succeeded (elastic: the last one), otherwise the status of the first failure.
    """
    exported = exported_environment(Path.cwd())
    sessions = [_open(command, exported) for command in commands]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for session in sessions:
            session.say(SIGNALS[signal.Signals(number)])

    former = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        return _wait(sessions, elastic, grace_period_s)
    finally:
        for session in sessions:
            session.close()
        for number, handler in former.items():
            signal.signal(number, handler)


def _open(command: Command, exported: dict[str, str]) -> _Session:
    assert command.host is not None
    agent = [sys.executable, str(Path(__file__).with_name("agent.py"))]
    # ssh passes its arguments to a shell; user-provided values are sent as JSON instead.
    away = ["ssh", *SSH_OPTIONS, command.host.name, shlex.join(agent)]
    try:
        process = subprocess.Popen(
            agent if command.host.is_here else away,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is forwarded by this process
        )
    except FileNotFoundError:
        raise ConfigError("launch.no_program", "ssh: no such program on this machine") from None
    session = _Session(command.host.name, process)
    environment = exported | command.environment
    spec = {"argv": command.argv, "cwd": os.getcwd(), "environment": environment}  # noqa: PTH109
    session.say(json.dumps(spec))
    return session


def _wait(sessions: list[_Session], elastic: bool, grace_period_s: float) -> int:
    running, failed, last = list(sessions), 0, 0
    deadline = None
    while running:
        for session in [s for s in running if s.process.poll() is not None]:
            running.remove(session)
            last = session.process.returncode
            if last == 0:
                continue
            failed = failed or last
            say(f"{session.host}: exited with status {last}", style="yellow")
            if not elastic and deadline is None:
                deadline = time.monotonic() + grace_period_s
        if deadline is not None and time.monotonic() > deadline:
            for session in running:
                session.close()  # its agent lets the ranks save, then kills them
            deadline = None
        time.sleep(POLL_S)
    status = last if elastic else failed
    return 1 if status == 255 or status < 0 else status  # ssh's own failure; a signal


def exported_environment(folder: Path) -> dict[str, str]:
    """The environment of every host: variables by prefix, then those of `.deepspeed_env`.

    The file is read from the home directory and then from `folder`, as in DeepSpeed.

    Raises:
        ConfigError: a line of the file is not of the form NAME=value.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    for path in (Path.home() / ENVIRONMENT_FILE, folder / ENVIRONMENT_FILE):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if not line.strip():
                continue
            name, equals, value = line.partition("=")
            if not equals or not name.strip().isidentifier():
                # The value may be a secret, so the message does not contain it.
                problem = f"invalid name {name!r}" if equals else "no `=`"
                raise ConfigError(
                    "launch.invalid_environment", f"{path}:{number}: {problem}; expected NAME=value"
                )
            found[name.strip()] = value.strip()
    return found
