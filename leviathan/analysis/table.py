"""The comparison table: one row a quantity, one column a run; for the page and for the terminal."""

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

MISSING = "–"


@dataclass(frozen=True)
class Row:
    """One quantity: a (value, change) pair of texts for every run; change is "" where none is."""

    section: str
    name: str
    cells: tuple[tuple[str, str], ...]


def comparison_rows(report: dict[str, Any]) -> list[Row]:
    """The table's rows in reading order."""
    runs = report["runs"]

    def row(
        section: str,
        name: str,
        value: Callable[[dict[str, Any]], str],
        change: Callable[[dict[str, Any]], str] = lambda relative: "",
    ) -> Row:
        return Row(
            section, name, tuple((value(run), change(run.get("relative") or {})) for run in runs)
        )

    rows = [
        row(
            "Result",
            "Validation loss, nats per token",
            _of("validation_loss", 4),
            _nats("validation_nats"),
        ),
        row(
            "Result", "Validation perplexity", _of("perplexity", 2), _percent("perplexity_percent")
        ),
        row("Result", "Bits per byte", _of("bits_per_byte", 4), _nats("bits_per_byte")),
        row("Result", "Training loss, last tenth", _of("train_loss", 4), _nats("train_nats")),
    ]
    rows += _task_rows(runs)
    rows += [
        row("Size", "Parameters", _part("total"), _parameters),
        row("Size", "· input embedding", _part("input_embedding")),
        row("Size", "· output head", _head),
        row("Size", "· body", _part("body")),
        row("Cost", "Training tokens per s", _of("tokens_per_s", 0), _percent("speed_percent")),
        row("Cost", "Time in training steps", _duration, _percent("train_seconds_percent")),
        row("Cost", "Steps", _steps),
        row("Cost", "Training tokens", _of("tokens", 0)),
    ]  # fmt: skip
    if any(run["skipped_steps"] for run in runs):
        rows.append(row("Cost", "Skipped steps (non-finite)", _of("skipped_steps", 0)))
    return [row for row in rows if any(value != MISSING for value, _ in row.cells)]


def terminal_table(report: dict[str, Any]) -> str:
    """The table as text for standard output, coloured only on a terminal."""
    table = Table(title="Comparison", title_justify="left", header_style="bold")
    table.add_column("")
    for run in report["runs"]:
        table.add_column(run["label"], justify="right")
    section = ""
    for row in comparison_rows(report):
        if section and row.section != section:
            table.add_section()
        section = row.section
        table.add_row(row.name, *(f"{value}  {change}".rstrip() for value, change in row.cells))
    lines = [render(table)]
    if report["pairing"]["note"]:
        lines.append(report["pairing"]["note"])
    return "\n".join([*lines, report["verdict"]])


def render(table: Table) -> str:
    """A rich table as a string, as wide as it needs to be where there is no terminal."""
    terminal = sys.stdout.isatty()
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=None if terminal else 200,
        highlight=False,
    )
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def number(value: float | None, digits: int) -> str:
    """`1,234.50`, or a dash."""
    return MISSING if value is None else f"{value:,.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int, unit: str = "") -> str:
    """`+0.0123`, with a real minus sign; a dash where there is no value."""
    return MISSING if value is None else f"{value:+,.{digits}f}{unit}".replace("-", "−")


def _task_rows(runs: Sequence[dict[str, Any]]) -> list[Row]:
    found = {(row["task"], row["metric"]) for run in runs for row in run["lm_eval"]}
    rows = []
    for task, metric in sorted(found):
        cells = []
        for run in runs:
            mine = [row for row in run["lm_eval"] if (row["task"], row["metric"]) == (task, metric)]
            cells.append((_score(mine[0]) if mine else MISSING, ""))
        rows.append(Row("Result", f"{task}, {metric}", tuple(cells)))
    return rows


def _score(row: dict[str, Any]) -> str:
    if row["value"] is None:
        return "not a number"
    accuracy = row["metric"].startswith(("acc", "exact_match"))
    scale, unit, digits = (100, " %", 1) if accuracy else (1, "", 3)
    text = number(scale * row["value"], digits)
    if row["stderr"] is not None:
        text += f" ± {number(scale * row['stderr'], digits)}"
    return text + unit


def _of(key: str, digits: int) -> Callable[[dict[str, Any]], str]:
    return lambda run: number(run[key], digits)


def _part(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda run: number((run["parameters"] or {}).get(key), 0)


def _head(run: dict[str, Any]) -> str:
    shared = run["kind"] == "tied" and (run["parameters"] or {}).get("output_head") == 0
    return "shared with input" if shared else _part("output_head")(run)


def _nats(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda relative: signed(relative[key], 4) if relative.get(key) is not None else ""


def _percent(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda relative: signed(relative[key], 1, " %") if relative.get(key) is not None else ""


def _parameters(relative: dict[str, Any]) -> str:
    percent = relative.get("parameters_percent")
    return signed(percent, 2, " %") if percent is not None else ""


def _duration(run: dict[str, Any]) -> str:
    seconds = run["train_seconds"]
    if seconds is None:
        return MISSING
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _steps(run: dict[str, Any]) -> str:
    if run["step"] == run["planned_steps"]:
        return f"{run['step']:,}"
    return f"{run['step']:,} of {run['planned_steps']:,}"
