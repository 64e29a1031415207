"""metrics.jsonl, and the figures in it that need a clock."""

import json
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from leviathan.data.files import write_atomic
from leviathan.engine.base import StepStats
from leviathan.errors import LeviathanError
from leviathan.train.spikes import WINDOW

METRICS = "metrics.jsonl"

# Dense bf16 FLOP/s of one device, by a part of its name; MFU is null for any other.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


class Metrics:
    """Counts what the loop does and writes a line where it says so (rank 0 only).

    Args:
        path: metrics.jsonl; lines of steps beyond `step` are removed from it, because these steps
            are about to be done anew.
        step: finished steps.
        tokens: target tokens trained on so far.
        skipped: steps so far whose gradients were not finite.
        flops_per_token: forward and backward, for MFU.
        world_size: devices at work.
        writes: False on all ranks but the first.
        losses: as logged before, oldest first; the same on every rank.
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
    ) -> None:
        self.tokens, self.skipped = tokens, skipped
        self.losses = deque(losses, WINDOW)  # the last that were logged
        self.skipped_in_a_row = 0
        self._path, self._writes = path, writes
        self._flops_per_token = flops_per_token
        self._peak = _peak_flops() * world_size
        self._restart_clock()
        self._steady: tuple[float, int] | None = None
        if writes:
            rewind(path, step)

    def _restart_clock(self) -> None:
        self._since, self._tokens_then, self._waited = time.perf_counter(), self.tokens, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent inside is time without data."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Time spent inside (evaluation, saving) is not training time."""
        begin = time.perf_counter()
        yield
        self._skip_time(time.perf_counter() - begin)

    def _skip_time(self, seconds: float) -> None:
        self._since += seconds
        if self._steady is not None:
            self._steady = (self._steady[0] + seconds, self._steady[1])

    def add(self, stats: StepStats) -> None:
        """Counts one step."""
        self.tokens += stats.tokens
        self.skipped += stats.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if stats.skipped else 0
        if self._steady is None:  # the first step also warms up; steady speed is counted from here
            self._steady = (time.perf_counter(), self.tokens)

    @property
    def steady_tokens_per_s(self) -> float:
        """Target tokens a second since the first step of this process; 0 before the second."""
        if self._steady is None:
            return 0.0
        since, tokens = self._steady
        return (self.tokens - tokens) / max(1e-9, time.perf_counter() - since)

    @property
    def tokens_per_s(self) -> float:
        """Target tokens a second over all ranks, since the last logged step."""
        return (self.tokens - self._tokens_then) / max(1e-9, time.perf_counter() - self._since)

    def log(
        self, step: int, stats: StepStats, lr: float, spike_rows: Sequence[int] | None = None
    ) -> None:
        """Writes the line of a finished step; loss and grad_norm are that step's own.

        `spike_rows` are the row numbers of a batch whose loss stands out; else there are none.
        """
        rate = self.tokens_per_s
        mfu = rate * self._flops_per_token / self._peak if self._peak else None
        self.write(
            step=step,
            tokens=self.tokens,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=lr,
            tokens_per_s=rate,
            mfu=mfu,
            data_wait_s=self._waited,
            skipped=self.skipped,
            **({} if spike_rows is None else {"spike_rows": list(spike_rows)}),
        )
        if math.isfinite(stats.loss):
            self.losses.append(stats.loss)
        self._restart_clock()

    def write(self, **values: Any) -> None:
        """Appends one object; what is no number in JSON becomes null.

        Raises:
            LeviathanError: the disk does not take it.
        """
        if not self._writes:
            return
        finite = {k: None if _is_nan_or_inf(v) else v for k, v in values.items()}
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(finite) + "\n")


def _is_nan_or_inf(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def logged_losses(path: Path, step: int) -> list[float]:
    """The finite losses of the log's lines up to `step`, oldest first."""
    losses = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            if values["step"] <= step and values.get("loss") is not None:
                losses.append(float(values["loss"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return losses


def rewind(path: Path, step: int) -> None:
    """Drops the lines of steps after `step`, and a last line that was cut off."""
    if not path.exists():
        return
    with writing(path):
        kept = []
        for line in path.read_bytes().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + b"\n")
            except (ValueError, KeyError, TypeError):
                continue
        write_atomic(path, b"".join(kept) if step else b"")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full or unwritable disk as an error that says what is lost: nothing that was saved."""
    try:
        yield
    except OSError as error:
        raise LeviathanError(
            f"{path}: cannot be written ({error}); the checkpoints saved so far stay: make room, "
            "and the same command goes on from the newest"
        ) from error


def _peak_flops() -> float:
    """The device's dense bf16 peak, 0 where it is not known (as on a CPU)."""
    if not torch.cuda.is_available():
        return 0.0
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), 0.0)
