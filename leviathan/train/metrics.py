"""The metrics of a run: the lines of metrics.jsonl and of the console.

All values come from results that the engine returns: nothing here synchronizes with the device.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from leviathan.console import utc_now
from leviathan.engine.base import StepStats
from leviathan.formatting import format_clock
from leviathan.hardware import find_device
from leviathan.train.metrics_log import append, rewind, without_nan
from leviathan.train.step_timer import CpuLoad
from leviathan.train.trackers import Tracker

# ---------------------------------------------------------------- loss spikes

WINDOW = 100  # number of logged losses in the running median
MIN_LOSSES = 20  # minimum number of losses for a threshold
FLOOR = 0.01  # minimum deviation as a fraction of the median, for nearly constant losses
SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution


def spike_threshold(losses: Sequence[float], deviations: float) -> float:
    """The loss above which a step is a spike: running median + `deviations` robust deviations.

    It depends only on the logged losses, so that an interrupted run warns at the same steps as an
    uninterrupted one. Median and median absolute deviation are robust to earlier spikes.

    Args:
        losses: finite logged losses in nats per token, oldest first; the last `WINDOW` are used.
        deviations: threshold in robust deviations; 0 disables the check.

    Returns:
        The threshold; infinity if disabled or with fewer than `ENOUGH` losses.
    """
    recent = list(losses)[-WINDOW:]
    if deviations == 0 or len(recent) < MIN_LOSSES:
        return math.inf
    median = statistics.median(recent)
    deviation = SIGMA * statistics.median([abs(loss - median) for loss in recent])
    return median + deviations * max(deviation, FLOOR * abs(median))


# ---------------------------------------------------------------- metrics

# Dense bf16 FLOP/s of one device, by a part of its name; MFU is null for any other.
SMOOTHING = 0.95  # share of the former in the smoothed loss: about the last 20 steps


class Metrics:
    """Accumulates metrics of the loop and writes log lines (rank 0 only).

    Args:
        path: metrics.jsonl; lines of steps beyond `step` are removed from it, because these steps
            are about to be repeated.
        step: finished steps.
        tokens: target tokens trained on so far.
        skipped: steps so far whose gradients were not finite.
        flops_per_token: FLOPs of forward and backward per token, for MFU.
        world_size: number of devices.
        writes: whether this rank writes the log.
        losses: previously logged losses, oldest first; the same on every rank.
        steps: total steps of the run, for the remaining time; 0 if unknown.
        six_n_flops_per_token: as `flops_per_token`, in the 6·N convention; see `ModelStats`.
        peak_flops: peak FLOP/s of one device; None selects it by the device's name.

    Attributes:
        tracker: also receives every line; None until it is set.
        load: measures the CPU load of other processes; None until it is set.
    """

    def __init__(
        self,
        path: Path,
        step: int,
        tokens: int,
        skipped: int,
        flops_per_token: float,
        world_size: int,
        writes: bool,
        losses: Sequence[float] = (),
        steps: int = 0,
        six_n_flops_per_token: float = 0.0,
        peak_flops: float | None = None,
    ) -> None:
        self.tokens, self.skipped = tokens, skipped
        self.losses = deque(losses, WINDOW)  # the last logged losses
        self.skipped_in_a_row = 0
        self.tracker: Tracker | None = None
        self.load: CpuLoad | None = None
        self._path, self._writes = path, writes
        self._flops, self._six_n_flops = flops_per_token, six_n_flops_per_token
        self._world_size, self._steps_left = world_size, steps - step
        self._peak = (peak_flops or device_peak_flops()) * world_size
        self._smooth: float | None = None
        self._restart_clock()
        self._steady: tuple[float, int] | None = None
        if writes:
            rewind(path, step)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        if self.tracker is not None:
            self.tracker.close()

    def _restart_clock(self) -> None:
        self._since, self._tokens_then, self._waited = time.perf_counter(), self.tokens, 0.0
        self._saved, self._profiled = 0.0, 0

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Counts the time inside as waiting for data."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    @contextmanager
    def exclude_from_throughput(self, on: bool = True, saving: bool = False) -> Iterator[None]:
        """Excludes the time inside (evaluation, saving) from throughput, if `on`."""
        if not on:
            yield
            return
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self._saved += seconds if saving else 0.0
        self._since += seconds
        if self._steady is not None:
            self._steady = (self._steady[0] + seconds, self._steady[1])

    def add(self, stats: StepStats, timed: bool = True) -> None:
        """Counts one step.

        Args:
            stats: statistics of the step.
            timed: whether the step counts for the speed; False for an excluded step.
        """
        self.tokens += stats.tokens
        if not timed:
            self._profiled += 1
            self._tokens_then += stats.tokens
            if self._steady is not None:
                self._steady = (self._steady[0], self._steady[1] + stats.tokens)
        self.skipped += stats.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if stats.skipped else 0
        self._steps_left -= 1
        if not stats.skipped:
            former = stats.loss if self._smooth is None else self._smooth
            self._smooth = SMOOTHING * former + (1 - SMOOTHING) * stats.loss
        if self._steady is None:  # excludes the first step, which includes warmup
            self._steady = (time.perf_counter(), self.tokens)

    @property
    def steady_tokens_per_s(self) -> float:
        """Target tokens per second since the first step of this process; 0 before the second."""
        if self._steady is None:
            return 0.0
        since, tokens = self._steady
        return (self.tokens - tokens) / max(1e-9, time.perf_counter() - since)

    @property
    def tokens_per_s(self) -> float | None:
        """Target tokens per second over all ranks since the last log line; None without steps."""
        if self._profiled and self.tokens == self._tokens_then:
            return None
        return (self.tokens - self._tokens_then) / max(1e-9, time.perf_counter() - self._since)

    def _seconds_left(self, tokens_per_step: int) -> float | None:
        rate = self.steady_tokens_per_s
        return self._steps_left * tokens_per_step / rate if rate and self._steps_left >= 0 else None

    def note(self, stats: StepStats) -> str:
        """The text next to the progress bar: smoothed loss, throughput, MFU and ETA."""
        loss = stats.loss if self._smooth is None else self._smooth
        return " · ".join([f"smoothed loss {loss:.4f}", *self._speed(stats)])

    def line(self, step: int, stats: StepStats, lr: float) -> str:
        """The console line of a logged step, which ended at `step` finished steps."""
        parts = [
            f"step {step:,}/{step + self._steps_left:,}",
            f"loss {stats.loss:.4f}",
            f"lr {lr:.2e}",
            f"grad norm {stats.grad_norm:.3g}",
        ]
        return " · ".join([*parts, *self._speed(stats)])

    def _speed(self, stats: StepStats) -> list[str]:
        rate, left = self.steady_tokens_per_s, self._seconds_left(stats.tokens)
        parts = [f"{rate:,.0f} tokens/s"] if rate else []
        if rate and self._peak:
            parts.append(f"MFU {rate * self._flops / self._peak:.1%}")
        if left is not None:
            parts.append(f"ETA {format_clock(left)}")
        return parts

    def log(
        self,
        step: int,
        stats: StepStats,
        lr: float,
        spike_rows: Sequence[int] | None = None,
        sampled: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the log line of a finished step, with the loss and gradient norm of that step.

        Args:
            step: number of finished steps.
            stats: statistics of the last step.
            lr: learning rate of the last step.
            spike_rows: sample numbers of the batch if its loss is a spike; None otherwise.
            sampled: measurements of `StepTimer` for this step.
        """
        rate, peak = self.tokens_per_s, self._peak
        self.write(
            step=step,
            tokens=self.tokens,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=lr,
            tokens_per_s=rate,
            mfu=rate * self._flops / peak if peak and rate is not None else None,
            data_wait_s=self._waited,
            skipped=self.skipped,
            tokens_per_s_per_rank=rate / self._world_size if rate is not None else None,
            mfu_6n=rate * self._six_n_flops / peak if peak and rate is not None else None,
            peak_flops=peak or None,
            checkpoint_s=self._saved,
            eta_s=self._seconds_left(stats.tokens),
            **(sampled or {}),
            **(self.load.figures() if self.load is not None else {}),
            **({"profiled_steps": self._profiled} if self._profiled else {}),
            **({} if spike_rows is None else {"spike_rows": list(spike_rows)}),
        )
        line_loss = without_nan(stats.loss)
        if line_loss is not None:
            self.losses.append(line_loss)
        self._restart_clock()

    def write(self, **values: Any) -> None:
        """Appends one object; values that JSON does not represent (NaN, infinity) become null.

        Raises:
            LeviathanError: the file cannot be written.
        """
        if not self._writes:
            return
        line = without_nan({**values, "time": utc_now()})
        append(self._path, line)
        if self.tracker is not None:
            self.tracker.log(line)


def device_peak_flops() -> float:
    """Dense bf16 peak of this rank's device in FLOP/s; 0 if it is not known, as on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    device = find_device(torch.cuda.get_device_name())
    return device.flops if device else 0.0
