"""How busy the machine was with other work, so that a speed measured then carries a note.

The system counts the CPU time of all processes, and that of each. What the run's own ranks have not
used, others have: other users, other runs, and on a virtual machine the host (steal time). A
container sees its whole host.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

LEAST_S = 1.0  # the system counts in hundredths of a second: less says nothing


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since the machine started, summed over its cores; `own`: of the run's ranks."""

    total: float
    idle: float
    own: float


def read_cpu_times(pids: Sequence[int]) -> CpuTimes:
    """What the system has counted so far."""
    times = psutil.cpu_times()
    # Where guests are counted at all, they are part of user and nice.
    parts = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    total = sum(getattr(times, name, 0.0) for name in parts)
    own = 0.0
    for pid in pids:
        try:
            used = psutil.Process(pid).cpu_times()
        except psutil.Error:
            continue
        own += used.user + used.system + used.children_user + used.children_system
    return CpuTimes(total, times.idle + getattr(times, "iowait", 0.0), own)


def local_pids(described: Mapping[str, Any]) -> list[int]:
    """Process ids of the ranks on this host, from what stands in run.json."""
    here = socket.gethostname()
    pairs = zip(described["pid"], described["host"], strict=True)
    return [pid for pid, host in pairs if host == here]


class CpuLoad:
    """Shares of this host's CPU time since the last line of the log.

    Args:
        pids: of the run's ranks on this host.
        read: what the system has counted; to be replaced in tests.
    """

    def __init__(
        self,
        pids: Sequence[int],
        read: Callable[[Sequence[int]], CpuTimes] = read_cpu_times,
    ) -> None:
        self._pids, self._read = pids, read
        self._cores = psutil.cpu_count() or 1
        self._former = read(pids)

    def figures(self) -> dict[str, float]:
        """`cpu_busy`, the share that was used, and `cpu_others`, the share that others used.

        Empty, and still counting, where less than a second has passed.
        """
        now, former = self._read(self._pids), self._former
        total = now.total - former.total
        if total < LEAST_S * self._cores:
            return {}
        self._former = now
        busy = total - (now.idle - former.idle)
        others = busy - (now.own - former.own)
        return {
            "cpu_busy": min(1.0, max(0.0, busy / total)),
            "cpu_others": min(1.0, max(0.0, others / total)),
        }
