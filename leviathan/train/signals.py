"""Stopping by signals: the handler sets a flag, and the loop stops after the current step.

The end of the launcher counts as a signal, because its ranks could not be stopped afterwards.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from leviathan.parallel.mesh import Mesh


def launcher_processes(environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Process ids of this rank's launcher, nearest first; a later change means one has exited.

    Empty without a launcher, because a background run may outlive its shell. For torchrun it is the
    parent. The deepspeed command starts a process that starts the ranks, and does not forward
    signals to it: if the command is killed, that process continues, so both are returned.
    """
    if "LOCAL_SIZE" in environ:
        parent = os.getppid()
        return parent, _parent_of(parent)
    if "TORCHELASTIC_RUN_ID" in environ:
        return (os.getppid(),)
    return ()


def _parent_of(pid: int) -> int:
    """The parent of a process; 0 if it is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # "pid (name) state parent …"


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Context manager that handles SIGTERM and SIGUSR1."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._received: str | None = None
        self._launchers = launcher_processes()
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name

    def agreed(self, also: bool = False) -> bool:
        """Whether any rank received a signal, lost its launcher, or passes `also`. Collective."""
        return self._mesh.any(also or self._reason() is not None)

    def reason(self) -> str:
        """Why the run stops, as the first rank with a reason has it. Collective."""
        reasons = [reason for reason in self._mesh.gather(self._reason()) if reason]
        return reasons[0] if reasons else "A checkpoint could not be saved"

    def _reason(self) -> str | None:
        if self._received is not None:
            return f"Received {self._received}"
        return "The launcher ended" if launcher_processes() != self._launchers else None
