"""Starting what `commands` says: here, or on every host at once over ssh."""

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

# What the launching shell has said that every rank must know; more is in `.deepspeed_env`.
EXPORTED = ("PYTHON", "NCCL", "GLOO", "TP_", "OMP_", "DS_", "CUDA_", "TIKTOKEN_", "LEVIATHAN_")
ENVIRONMENT_FILE = ".deepspeed_env"
SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "SIGTERM"}
POLL_S = 0.2


def run_here(command: Command) -> NoReturn:
    """Becomes the command: signals and exit status are its own.

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
    """The way to one host's agent."""

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
    """Runs each command on its host until all have ended; passes SIGTERM and SIGUSR1 to the ranks.

    Args:
        commands: one a host.
        elastic: the hosts that are left continue without one that fails; else its end is theirs.
        grace_period_s: seconds the others have to end by themselves after a first failure.

    Returns:
        0 if all ended well (elastic: the last one), else the status of the first that did not.
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
    # ssh hands its words to a shell; these two are ours, all that is the user's comes as JSON.
    away = ["ssh", *SSH_OPTIONS, command.host.name, shlex.join(agent)]
    try:
        process = subprocess.Popen(
            agent if command.host.is_here else away,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us to pass on
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
            say(f"{session.host} ended with status {last}", style="yellow")
            if not elastic and deadline is None:
                deadline = time.monotonic() + grace_period_s
        if deadline is not None and time.monotonic() > deadline:
            for session in running:
                session.close()  # its agent saves, then kills, what is still there
            deadline = None
        time.sleep(POLL_S)
    status = last if elastic else failed
    return 1 if status == 255 or status < 0 else status  # ssh's own failure; a signal


def exported_environment(folder: Path) -> dict[str, str]:
    """What every host's processes get: variables by prefix, then those of `.deepspeed_env`.

    The file is looked for in the home folder and then in `folder`, as DeepSpeed does.

    Raises:
        ConfigError: a line of it is no NAME=value.
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
                said = f"{name!r} before =" if equals else "no ="  # what is behind may be a secret
                raise ConfigError(
                    "launch.invalid_environment", f"{path}:{number}: {said}: expected NAME=value"
                )
            found[name.strip()] = value.strip()
    return found
