"""Stopping by signals: the handler sets a flag, and the loop stops after the current step.

The end of the launcher counts as a signal, because its ranks could not be stopped afterwards.
"""

import signal
from types import FrameType
from typing import Any

from leviathan.parallel.launcher_processes import launcher_processes
from leviathan.parallel.mesh import Mesh

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
