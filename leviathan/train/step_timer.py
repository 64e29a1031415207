"""Time breakdown of a step, measured only on logged steps."""

import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from leviathan.model.transformer import CausalLM
from leviathan.parallel.mesh import Mesh

# ---------------------------------------------------------------- CPU load
# CPU time in use minus that of the run's own ranks is the time of other processes: other users,
# other runs, and the host of a virtual machine (steal time). A container reads the counters of its
# host.

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


# ---------------------------------------------------------------- timer

Mark = float | torch.cuda.Event


class StepTimer:
    """Times the input embedding, the head and the full forward pass with module hooks.

    On CUDA it records stream events, read after the engine has synchronized for the step's loss, so
    that no additional synchronization is needed.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._on = mesh, False
        self._cuda = mesh.device.type == "cuda"
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._step_s = 0.0

    def attached(self, model: CausalLM) -> CausalLM:
        """Registers hooks on the model, which are active only in sampled steps; returns it."""
        self._time(model.model.embed_tokens, "embedding")
        self._time(model.lm_head, "head")
        self._time(model, "forward")
        return model

    def _time(self, module: nn.Module, name: str) -> None:
        opened: list[Mark] = []

        def before(module: nn.Module, args: Any) -> None:
            if self._on:
                opened.append(self._mark())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._on and opened:
                self._close(name, opened.pop())
                if isinstance(output, Tensor) and output.requires_grad:
                    self._time_backward(name, args[0], output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _time_backward(self, name: str, x: Tensor, output: Tensor) -> None:
        """Times the backward pass from the gradient of the output to that of the input."""
        opened: list[Mark] = []

        def close(*_: Any) -> None:
            self._close(name, opened.pop())

        def begin(_: Tensor) -> None:
            opened.append(self._mark())
            if name == "embedding":  # its gradients are computed last
                Variable._execution_engine.queue_callback(close)

        if name != "forward":
            output.register_hook(begin)
        if name == "head":
            x.register_hook(close)

    def _close(self, name: str, begin: Mark) -> None:
        self._spans.append((name, begin, self._mark()))

    def _mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def sampling(self, on: bool) -> Iterator[None]:
        """Measures the step inside, if `on`."""
        self._on, self._spans, begin = on, [], time.perf_counter()
        yield
        self._on, self._step_s = False, time.perf_counter() - begin

    def figures(self) -> dict[str, Any]:
        """Measurements of the last step; empty if it was not sampled. Collective.

        Returns:
            `embedding_share`, `head_share`: fractions of the step's time, forward and backward, on
            this rank; `forward_s` of the `fastest` and the `slowest` rank: seconds in forward
            passes, in which ranks do not wait for each other unless weights are gathered;
            `slowest_rank`; and `memory_peak_bytes`, the maximum over ranks: peak memory allocated
            by torch since the last call on CUDA, peak resident memory of the process on the CPU.
        """
        if not self._spans:
            return {}
        seconds = {"embedding": 0.0, "head": 0.0, "forward": 0.0}
        for name, begin, end in self._spans:
            seconds[name] += _between(begin, end)
        self._spans = []
        forward = self._of_all_ranks(seconds["forward"])
        return {
            "embedding_share": seconds["embedding"] / self._step_s,
            "head_share": seconds["head"] / self._step_s,
            "forward_s": {"fastest": min(forward), "slowest": max(forward)},
            "slowest_rank": forward.index(max(forward)),
            "memory_peak_bytes": int(max(self._of_all_ranks(self._memory_peak()))),
        }

    def _of_all_ranks(self, value: float) -> list[float]:
        mine = [0.0] * self._mesh.world_size
        mine[self._mesh.rank] = value
        return self._mesh.sum(*mine)

    def _memory_peak(self) -> int:
        if not self._cuda:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.cuda.max_memory_allocated(self._mesh.device)
        torch.cuda.reset_peak_memory_stats(self._mesh.device)
        return peak


def _between(begin: Mark, end: Mark) -> float:
    """The time between two marks in seconds."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) / 1e3
    assert isinstance(end, float)
    return end - begin
