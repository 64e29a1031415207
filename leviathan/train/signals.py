"""Being told to stop: a signal only sets a flag, the loop acts on it between two steps.

A launcher that is gone is a signal too: its ranks would train on with nobody to stop them.
"""

import signal
from types import FrameType
from typing import Any

from leviathan.parallel.launchers import launcher_processes
from leviathan.parallel.mesh import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Listens for SIGTERM and SIGUSR1 while used as a context."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._received = False
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
        self._received = True

    def agreed(self, also: bool = False) -> bool:
        """True on every rank once any was told to stop, its launcher died, or it says so itself.

        Collective.
        """
        return self._mesh.any(also or self._received or launcher_processes() != self._launchers)
