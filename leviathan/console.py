"""Console output. Everything except results goes to standard error, from rank 0 only."""

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from leviathan.credentials import without_credentials

console = Console(stderr=True, highlight=False, soft_wrap=True)

PLAIN_INTERVAL_S = 15.0  # interval of progress lines without a terminal, seconds

_with_time = False


def is_rank_zero() -> bool:
    """Whether this process prints for the run; also without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str, style: str | None = None) -> None:
    """Prints one line to standard error on rank 0; `text` is not interpreted as rich markup."""
    if is_rank_zero():
        time = f"{utc_now()} " if _with_time else ""
        console.print(time + without_credentials(text), style=style, markup=False)


def utc_now() -> str:
    """UTC time as in logs: 2024-02-29T12:34:56Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def times_on_lines() -> Iterator[None]:
    """Prefixes each line of `say` with the UTC time."""
    global _with_time
    before, _with_time = _with_time, True
    try:
        yield
    finally:
        _with_time = before


def as_text(*tables: RenderableType) -> str:
    """Tables as text for standard output: colored on a terminal, of unlimited width elsewhere."""
    terminal = sys.stdout.isatty()
    page = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=None if terminal else 200,
        highlight=False,
    )
    for table in tables:
        page.print(table)
    assert isinstance(page.file, io.StringIO)
    return page.file.getvalue().rstrip()


class Bar:
    """A progress count with a note; a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, title: str, total: float | None, progress: Progress | None) -> None:
        self.title, self.total, self.progress = title, total, progress
        self.done, self.note = 0.0, ""
        self._last_line = time.monotonic()
        self._task = progress.add_task(title, total=total, note="") if progress else None

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Adds `amount` completed units and shows `note` next to the bar."""
        self.done += amount
        self.note = self.note if note is None else note
        if self.progress is not None and self._task is not None:
            self.progress.update(self._task, completed=self.done, note=self.note)
        elif time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            say(self._line())

    def _line(self) -> str:
        of = f"/{self.total:,.0f}" if self.total else ""
        return f"{self.title}: {self.done:,.0f}{of} {self.note}".rstrip()


@contextmanager
def progress_bar(
    title: str, total: float | None = None, start: float = 0, plain: bool = True
) -> Iterator[Bar]:
    """A progress bar for long work; silent except on rank 0.

    Args:
        title: text before the bar.
        total: units of work; None if unknown.
        start: units that are already complete.
        plain: whether to print progress lines without a terminal.
    """
    if not is_rank_zero() or not (plain or console.is_terminal):
        bar = Bar(title, total, None)
        bar._last_line = float("inf")
        yield bar
        return
    if not console.is_terminal:
        bar = Bar(title, total, None)
        bar.done = start
        yield bar
        say(bar._line())
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = Bar(title, total, progress)
        bar.advance(start)
        yield bar
