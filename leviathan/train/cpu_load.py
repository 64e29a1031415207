"""CPU load of other processes, so that the report can mark speeds of an overloaded machine.

CPU time in use minus that of the run's own ranks is the time of other processes: other users, other
runs, and the host of a virtual machine (steal time). A container reads the counters of its host.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

MIN_INTERVAL_S = 1.0  # minimum interval; the system counts in hundredths of a second


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since boot, summed over cores; `own`: CPU seconds of the run's ranks."""

    total: float
    idle: float
    own: float


def read_cpu_times(pids: Sequence[int]) -> CpuTimes:
    """The current counters of the system and of the processes `pids`."""
    times = psutil.cpu_times()
    # Times of guests are already part of user and nice.
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
    """Process ids of the ranks on this host, from the content of run.json."""
    here = socket.gethostname()
    pairs = zip(described["pid"], described["host"], strict=True)
    return [pid for pid, host in pairs if host == here]


class CpuLoad:
    """CPU load of this host between log lines.

    Args:
        pids: process ids of the run's ranks on this host.
        read: reads the counters; tests replace it.
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
        """Shares of CPU time since the previous call: `cpu_busy`, and `cpu_others` of it.

        Empty if less than a second has passed; the interval then continues.
        """
        now, former = self._read(self._pids), self._former
        total = now.total - former.total
        if total < MIN_INTERVAL_S * self._cores:
            return {}
        self._former = now
        busy = total - (now.idle - former.idle)
        others = busy - (now.own - former.own)
        return {
            "cpu_busy": min(1.0, max(0.0, busy / total)),
            "cpu_others": min(1.0, max(0.0, others / total)),
        }
