"""`leviathan train --profile steps=10-12`: a trace of these steps and their time by operator.

Hooks mark the forward passes of modules; an operator of the backward pass is assigned to the module
whose operator it differentiates, by autograd's sequence numbers.
"""

import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from leviathan.console import as_text, say
from leviathan.errors import ConfigError
from leviathan.model.transformer import CausalLM
from leviathan.parallel.mesh import Mesh

MODULE_MARK = "module: "
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_mm", "mkldnn_linear")
ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")
TOP = 25  # rows of the text table; the CSV file has all
SNAPSHOT_ENTRIES = 100_000  # allocations recorded on CUDA


@dataclass(frozen=True)
class ProfileConfig:
    """The steps to profile, counted from 1 as in the log."""

    first: int
    last: int
    memory: bool = False


def parse_profile(text: str | None, memory: bool, steps: int) -> ProfileConfig | None:
    """Parses `--profile` and `--memory-snapshot` for a run of `steps` steps.

    Raises:
        ConfigError: the option has another form, or the run does not have these steps.
    """
    if text is None:
        if memory:
            raise ConfigError(
                "cli.conflicting_options",
                "--memory-snapshot requires --profile, which selects the steps",
            )
        return None
    found = re.fullmatch(r"steps=(\d+)(?:-(\d+))?", text)
    if found is None:
        raise ConfigError(
            "cli.invalid_option", f"--profile {text}: expected steps=FIRST-LAST, as in steps=10-12"
        )
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last <= steps:
        raise ConfigError(
            "cli.invalid_option",
            f"--profile {text}: expected steps between 1 and train.steps={steps}",
        )
    return ProfileConfig(first, last, memory)


class Profiler:
    """Profiles steps on rank 0; leaving the context early writes the steps recorded so far."""

    def __init__(
        self, wish: ProfileConfig | None, run_dir: Path, mesh: Mesh, compiled: bool
    ) -> None:
        self._wish = wish if mesh.rank == 0 else None
        self._steps = range(wish.first, wish.last + 1) if wish is not None else range(0)
        self._cuda, self._compiled = mesh.device.type == "cuda", compiled
        self._modules: list[tuple[str, nn.Module]] = []
        self._hooks: list[Any] = []
        self._profile: profile | None = None
        if wish is not None:
            self.folder = run_dir / "profile" / f"steps-{wish.first}-{wish.last}"

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._finish()

    def attached(self, model: CausalLM) -> CausalLM:
        """Registers the model's modules for attribution; returns the model."""
        for name, module in model.named_modules():
            # Hooks inside a compiled block would cause graph breaks.
            inside = self._compiled and re.search(r"layers\.\d+\.", name)
            if name and not inside:
                self._modules.append((name, module))
        return model

    def covers(self, number: int) -> bool:
        """Whether step `number` is profiled; the same on every rank."""
        return number in self._steps

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profiles step number `number`, which runs inside, if it is selected."""
        if self._wish is None:
            yield
            return
        if self._profile is None and self._wish.first <= number <= self._wish.last:
            self._start(self._wish)
        yield
        if self._profile is not None and number >= self._wish.last:
            self._finish()

    def _start(self, wish: ProfileConfig) -> None:
        self._hooks = [hook for name, module in self._modules for hook in _marked(name, module)]
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
            if wish.memory:
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        self._profile = profile(activities=activities, profile_memory=wish.memory)
        self._profile.start()

    def _finish(self) -> None:
        """Stops and writes the profile; a write error is a warning and does not stop the run."""
        assert self._profile is not None
        assert self._wish is not None
        done, self._profile = self._profile, None
        done.stop()
        for hook in self._hooks:
            hook.remove()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(done, self._wish)
        except OSError as error:
            say(f"warning: {self.folder}: cannot write the profile ({error})", style="yellow")
        if self._cuda and self._wish.memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, done: profile, wish: ProfileConfig) -> None:
        trace = self.folder / "trace.json"
        done.export_chrome_trace(str(trace))
        rows = operators(done.events(), self._cuda)
        write_csv(rows, self.folder / "operators.csv")
        text = summary(rows)
        if wish.memory and self._cuda:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            text += "\nmemory.pickle: every allocation, for https://pytorch.org/memory_viz\n"
        elif wish.memory:
            peak = write_memory(trace, self.folder / "memory.csv")
            text += f"\nmemory.csv: peak memory {peak / 1e6:,.1f} MB above the initial amount\n"
        (self.folder / "operators.txt").write_text(text, encoding="utf-8")
        say(f"{self.folder}: trace and operators of steps {wish.first}-{wish.last}")
        say(text.splitlines()[0])


def _marked(name: str, module: nn.Module) -> Iterator[Any]:
    """Hooks that mark a module's forward passes."""
    opened: list[record_function] = []

    def before(module: nn.Module, args: Any) -> None:
        opened.append(record_function(MODULE_MARK + name))
        opened[-1].__enter__()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    yield module.register_forward_pre_hook(before)
    yield module.register_forward_hook(after)


@dataclass(frozen=True)
class Operator:
    """Time of one operator in one module and phase, over all profiled steps."""

    module: str
    phase: str  # forward, backward, update or other
    operator: str
    calls: int
    seconds: float  # without the operators that it calls
    share: float  # fraction of the time of all operators

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product."""
        return self.operator.removeprefix("aten::") in PRODUCTS

    @property
    def is_attention(self) -> bool:
        """Whether it is a fused attention kernel, which includes its matrix products."""
        return any(part in self.operator for part in ATTENTION)


def operators(events: Any, cuda: bool) -> list[Operator]:
    """Aggregates the events of a profile by module and operator, longest first.

    On CUDA, `seconds` is the time of the kernels that an operator launched.
    """
    seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str, str]] = Counter()
    here = [event for event in events if event.device_type.name == "CPU"]
    makers = {  # autograd refers to the last operator with a sequence number
        event.sequence_nr: event
        for event in here
        if event.sequence_nr >= 0 and not _in_backward(event)
    }
    for event in here:
        own = event.self_device_time_total if cuda else event.self_cpu_time_total
        key = (*_place(event, makers), event.name.removeprefix(MODULE_MARK))
        seconds[key] += own / 1e6
        calls[key] += 1
    total = sum(seconds.values()) or 1.0
    longest = sorted(seconds.items(), key=itemgetter(1), reverse=True)
    return [Operator(*key, calls[key], value, value / total) for key, value in longest]


def _upwards(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _in_backward(event: Any) -> bool:
    return any("evaluate_function" in above.name for above in _upwards(event))


def _place(event: Any, makers: dict[int, Any]) -> tuple[str, str]:
    """The module and phase of an event; all layers are merged."""
    for above in _upwards(event):
        if above.name.startswith(MODULE_MARK):
            phase = "backward" if _in_backward(above) else "forward"
            return re.sub(r"layers\.\d+", "layers.*", above.name.removeprefix(MODULE_MARK)), phase
        if "evaluate_function" in above.name:
            maker = makers.get(above.sequence_nr)
            return (_place(maker, {})[0] if maker else "other"), "backward"
        if above.name.startswith("Optimizer."):
            return "optimizer", "update"
    return "other", "other"


def write_csv(rows: list[Operator], file: Path) -> None:
    """Writes one line per operator."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["module", "phase", "operator", "calls", "seconds", "share"])
        for row in rows:
            figures = (f"{row.seconds:.6f}", f"{row.share:.6f}")
            writer.writerow([row.module, row.phase, row.operator, row.calls, *figures])


def summary(rows: list[Operator]) -> str:
    """Formats the share of matrix products, and tables of the slowest modules and operators."""
    products = sum(row.share for row in rows if row.is_product)
    attention = sum(row.share for row in rows if row.is_attention)
    modules: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        modules[row.module] += row.seconds
    total = sum(modules.values()) or 1.0
    by_module, by_operator = Table(title="By module"), Table(title="By operator")
    for head in ("module", "ms", "share"):
        by_module.add_column(head, justify="left" if head == "module" else "right")
    for module, value in sorted(modules.items(), key=itemgetter(1), reverse=True)[:TOP]:
        by_module.add_row(module, f"{value * 1e3:,.2f}", f"{value / total:.1%}")
    for head in ("module", "phase", "operator", "calls", "ms", "share"):
        by_operator.add_column(
            head, justify="right" if head in ("calls", "ms", "share") else "left"
        )
    for row in rows[:TOP]:
        figures = f"{row.calls:,}", f"{row.seconds * 1e3:,.2f}", f"{row.share:.1%}"
        by_operator.add_row(row.module, row.phase, row.operator, *figures)
    first = (
        f"matrix products: {products:.1%} of the operators' time, attention kernels {attention:.1%}"
    )
    return f"{first}\n\n{as_text(by_module)}\n\n{as_text(by_operator)}\n"


def write_memory(trace: Path, file: Path) -> int:
    """Writes the CPU allocations and deallocations of a trace, one event per line.

    Returns:
        Peak bytes above the amount before the first event.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    marks = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = peak = 0
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["microseconds", "bytes", "held_bytes"])
        for moment, size in marks:
            held += size
            peak = max(peak, held)
            writer.writerow([f"{moment - marks[0][0]:.1f}", size, held])
    return peak
