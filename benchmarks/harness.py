"""Shared code of the benchmarks: paired timing, peak memory, one JSON object per line, a table.

    python benchmarks/harness.py FILE.jsonl …     # a table of results collected with --json

Both sides run alternately in the same process, so that both are exposed to the same changes in
machine speed. The ratio is the median of the ratios of the rounds. `ratio` is the other's value
divided by ours if the goal is a "≥", and ours divided by the other's if it is a "≤".
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """One result; `other`, `goal` and `holds` are None if there is no reference."""

    benchmark: str
    case: str
    ours: float
    other: float | None
    other_name: str | None
    unit: str
    ratio: float | None
    goal: str | None
    holds: bool | None


class Report:
    """Prints results immediately, as JSON lines or as rows of a table."""

    def __init__(self, benchmark: str, as_json: bool) -> None:
        self._benchmark, self._json = benchmark, as_json
        if not as_json:
            print(_row("case", "ours", "other", "unit", "ratio", "goal", "holds"), flush=True)

    def compare(
        self, case: str, pairs: list[tuple[float, float]], other_name: str, unit: str, goal: str
    ) -> None:
        """Medians of `(ours, other)` pairs, their median ratio, and whether the goal holds."""
        sign, bound = goal.split()
        ratios = [o / u if sign == "≥" else u / o for u, o in pairs]
        ratio = statistics.median(ratios)
        holds = ratio >= float(bound) if sign == "≥" else ratio <= float(bound)
        ours, other = (statistics.median(side) for side in zip(*pairs, strict=True))
        self._print(case, ours, other, other_name, unit, ratio, goal, holds)

    def figure(
        self,
        case: str,
        ours: float,
        unit: str,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """A value of Leviathan alone, with an optional bound in the same unit."""
        goal, holds = None, None
        if at_most is not None:
            goal, holds = f"≤ {at_most:g} {unit}", ours <= at_most
        elif at_least is not None:
            goal, holds = f"≥ {at_least:g} {unit}", ours >= at_least
        self._print(case, ours, None, None, unit, None, goal, holds)

    def equal(
        self, case: str, ours: float, other: float, other_name: str, unit: str, within: float
    ) -> None:
        """Two values that must be equal up to rounding; `ratio` is ours divided by the other's."""
        ratio = ours / other if other else None
        same = abs(ours - other) <= within
        self._print(case, ours, other, other_name, unit, ratio, f"± {within:g}", same)

    def _print(self, case: str, *rest: Any) -> None:
        line = Line(self._benchmark, case, *rest)
        print(json.dumps(asdict(line), ensure_ascii=False) if self._json else _table_row(line))
        sys.stdout.flush()


def arguments(description: str, rounds: int) -> argparse.ArgumentParser:
    """Parses the options common to all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"paired rounds ({rounds})")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser


def ready(device: str) -> torch.device:
    """Returns the device after checking that it is available.

    Raises:
        SystemExit: CUDA is requested but not available.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda, but torch finds no CUDA device")
    torch.manual_seed(0)
    return torch.device(device)


def seconds(work: Work, device: torch.device) -> float:
    """Runs once and synchronizes the device."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def paired(
    ours: Work, other: Work, rounds: int, device: torch.device, warm: bool = True
) -> list[tuple[float, float]]:
    """Returns the seconds of both, alternating the order, after one warm-up run of each."""
    if warm:
        ours()
        other()
    pairs = []
    for number in range(rounds):
        if number % 2:
            theirs = seconds(other, device)
            pairs.append((seconds(ours, device), theirs))
        else:
            pairs.append((seconds(ours, device), seconds(other, device)))
    return pairs


def peak_megabytes(work: Work, device: torch.device) -> float:
    """Returns the peak memory of `work` above the memory in use before, in MB (10⁶ bytes)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        _wait(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
    before = _status_kilobytes("VmRSS")
    work()
    return (_status_kilobytes("VmHWM") - before) * 1024 / 1e6


def shared_data() -> Path | None:
    """$LEVIATHAN_SHARED, or `shared` in the repository's parent directory, if it exists."""
    beside = Path(__file__).parent.parent.parent / "shared"
    folder = Path(os.environ.get("LEVIATHAN_SHARED", beside)) / "data"
    return folder if folder.is_dir() else None


def _status_kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(*cells: str) -> str:
    case, *rest = cells
    return f"{case:58}" + "".join(f"{cell:>12}" for cell in rest)


def _table_row(line: Line) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    verdict = {None: "", True: "yes", False: "NO"}[line.holds]
    other, ratio = number(line.other), number(line.ratio)
    row = _row(line.case, number(line.ours), other, line.unit, ratio, line.goal or "", verdict)
    return f"{row}  {line.other_name or ''}".rstrip()


def _read(paths: list[str]) -> Iterator[Line]:
    for path in paths:
        for text in Path(path).read_text().splitlines():
            yield Line(**json.loads(text))


if __name__ == "__main__":
    benchmark = None
    for result in _read(sys.argv[1:]):
        if result.benchmark != benchmark:
            benchmark = result.benchmark
            print(f"\n{benchmark}")
            print(_row("case", "ours", "other", "unit", "ratio", "goal", "holds"))
        print(_table_row(result))
