"""The comparison table, for page and terminal, and the numbers of the report as CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from leviathan.console import as_text
from leviathan.evaluate.frequency_buckets import SCALES
from leviathan.report.runs import CPU_BUSY, CPU_OTHERS

# ---------------------------------------------------------------- comparison table

MISSING = "–"
OVERLOADED = 0.1  # share of the logged intervals above which the speed has a note
VALIDATION = "Validation loss, nats per token"
MEASURED_ON = "· measured on"


@dataclass(frozen=True)
class ComparisonRow:
    """One quantity: a (value, change) pair of texts per arm; change may be ""."""

    section: str
    name: str
    cells: tuple[tuple[str, str], ...]


def comparison_rows(group: dict[str, Any]) -> list[ComparisonRow]:
    """The rows of the table in reading order, one column per arm."""
    arms = group["arms"]

    def row(
        section: str,
        name: str,
        value: Callable[[dict[str, Any]], str],
        change: Callable[[dict[str, Any]], str] = lambda relative: "",
    ) -> ComparisonRow:
        return ComparisonRow(
            section, name, tuple((value(arm), change(arm.get("relative") or {})) for arm in arms)
        )

    rows = [
        row("Result", VALIDATION, _of("validation_loss", 4), _nats("validation_nats")),
        row("Result", "Perplexity", _of("perplexity", 2), _percent("perplexity_percent")),
        row("Result", "Loss improvement, as in the papers", _gain),
        row("Result", "Difference over seeds, 95 %", _over_seeds),
        row("Result", "Bits per byte", _of("bits_per_byte", 4), _nats("bits_per_byte")),
        row("Result", "Training loss, last tenth", _of("train_loss", 4), _nats("train_nats")),
        row("Sample efficiency", "Tokens to the baseline's final loss", _needed),
        row("Sample efficiency", "· times fewer", _times_fewer),
        row("Sample efficiency", "Baseline was at the arm's loss after", _behind),
        row("Sample efficiency", "Device-hours to that loss", _hours_needed, _baseline_hours),
        row("Size", "Parameters", _part("total"), _change("parameters_percent", 2)),
        row("Size", "· input embedding", _part("input_embedding")),
        row("Size", "· output head", _head),
        row("Size", "· body", _part("body")),
        row("Size", "FLOPs per token", _of("flops_per_token", 0), _change("flops_percent", 2)),
        row("Size", "Training FLOPs", _flops),
        row("Setting", "Peak learning rate", _lr),
        row("Cost", "Training tokens per s", _speed, _percent("speed_percent")),
        row("Cost", MEASURED_ON, _machines),
        row("Cost", "Time in training steps", _duration, _percent("train_seconds_percent")),
        row("Cost", "Steps", _steps),
        row("Cost", "Training tokens", _of("tokens", 0)),
        row("Cost", "Seeds", lambda arm: str(len(arm["seeds"]))),
    ]  # fmt: skip
    if speed_note(group):  # reported once, below the table
        rows = [row for row in rows if row.name != MEASURED_ON]
    if any(arm["skipped_steps"] for arm in arms):
        rows.append(row("Cost", "Skipped steps (non-finite)", _of("skipped_steps", 0)))
    return [row for row in rows if any(value != MISSING for value, _ in row.cells)]


def terminal_table(report: dict[str, Any]) -> str:
    """The tables as text for standard output; colored only on a terminal."""
    lines = []
    for group in report["groups"]:
        table = Table(
            title=f"Comparison, {group['name']}" if group["name"] else "Comparison",
            title_justify="left",
            header_style="bold",
        )
        table.add_column("")
        for arm in group["arms"]:
            table.add_column(arm_title(arm), justify="right")
        section = ""
        for row in comparison_rows(group):
            if section and row.section != section:
                table.add_section()
            section = row.section
            cells = (f"{value}  {change}".rstrip() for value, change in row.cells)
            table.add_row(row.name, *cells)
        lines.append(as_text(table))
        notes = [speed_note(group), load_note(group), group["loss_note"], group["pairing"]["note"]]
        notes += [within_note(group), differences_note(group), sweep_note(group)]
        lines += [note for note in notes if note]
    return "\n".join([*lines, report["summary"]])


def speed_note(group: dict[str, Any]) -> str:
    """Hardware and date of all speeds; empty if the arms differ in them or they are unknown."""
    machines = {tuple(arm["machines"]) for arm in group["arms"]}
    if len(machines) != 1 or not (own := machines.pop()):
        return ""
    return f"Tokens per s were measured on {'; '.join(own)}."


def load_note(group: dict[str, Any]) -> str:
    """Names the speeds that were measured while other processes used much of the CPU time."""
    arms = [arm for arm in group["arms"] if arm["overloaded"] >= OVERLOADED]
    if not arms:
        return ""
    shares = ", ".join(f"{arm['label']}: {100 * arm['overloaded']:.0f} %" for arm in arms)
    return (
        f"* Measured on an overloaded machine: other processes used at least "
        f"{100 * CPU_OTHERS:.0f} % of its CPU time, and at least {100 * CPU_BUSY:.0f} % was in "
        f"use, in this share of the logged intervals: {shares}. These speeds are unreliable."
    )


def differences_note(group: dict[str, Any]) -> str:
    """Configuration keys in which the arms differ, with their values; not the embedding's keys."""
    shown = []
    for one in group["config_differences"]:
        key = one["key"]
        if key.startswith("model.embedding.") and key != "model.embedding.kind":
            continue
        values = ", ".join(MISSING if value is None else str(value) for value in one["values"])
        shown.append(f"{key} ({values})")
    return f"Configuration keys in which the arms differ: {'; '.join(shown)}." if shown else ""


def within_note(group: dict[str, Any]) -> str:
    """Names the arms whose runs differ in engine or parallelism; these runs are still averaged."""
    parts = [
        f"{arm['label']}: {', '.join(arm['differs_within'])}"
        for arm in group["arms"]
        if arm["differs_within"]
    ]
    return f"Runs of one arm differ in more than the seed: {'; '.join(parts)}." if parts else ""


def sweep_note(group: dict[str, Any]) -> str:
    """States how the settings of a swept arm were chosen."""
    if not group["sweep"]:
        return ""
    return (
        f"Each arm is shown at the {', '.join(group['sweep']['keys'])} with its lowest training "
        "loss; the validation split is not used to choose it."
    )


def arm_title(arm: dict[str, Any]) -> str:
    """Formats an arm: `leviathan`, or `leviathan (lr 0.002)` if a sweep chose the value."""
    return f"{arm['label']} ({arm['swept']})" if arm["swept"] else arm["label"]


def number(value: float | None, digits: int) -> str:
    """Formats a number: `1,234.50`, or a dash."""
    return MISSING if value is None else f"{value:,.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int, unit: str = "") -> str:
    """Formats a difference: `+0.0123`, with U+2212 as minus sign; a dash without a value."""
    return MISSING if value is None else f"{value:+,.{digits}f}{unit}".replace("-", "−")


def score(cell: dict[str, Any], metric: str) -> str:
    """A value of a task ± its standard error; accuracies in percent."""
    if cell["value"] is None:
        return "not a number" if cell["samples"] else MISSING
    scale, unit, digits = task_scale(metric)
    text = number(scale * cell["value"], digits)
    if cell["stderr"] is not None:
        text += f" ± {number(scale * cell['stderr'], digits)}"
    return text + unit


def task_scale(metric: str) -> tuple[float, str, int]:
    """(factor, unit, digits) in which a metric is shown."""
    return (100, " %", 1) if metric.startswith(("acc", "exact_match")) else (1, "", 3)


def _of(key: str, digits: int) -> Callable[[dict[str, Any]], str]:
    return lambda arm: number(arm[key], digits)


def _part(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda arm: number((arm["parameters"] or {}).get(key), 0)


def _head(arm: dict[str, Any]) -> str:
    shared = arm["kind"] == "tied" and (arm["parameters"] or {}).get("output_head") == 0
    return "shared with input" if shared else _part("output_head")(arm)


def _nats(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda relative: signed(relative[key], 4) if relative.get(key) is not None else ""


def _percent(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda relative: signed(relative[key], 1, " %") if relative.get(key) is not None else ""


def _change(key: str, digits: int) -> Callable[[dict[str, Any]], str]:
    return lambda relative: (
        signed(relative[key], digits, " %") if relative.get(key) is not None else ""
    )


def _gain(arm: dict[str, Any]) -> str:
    return signed((arm.get("relative") or {}).get("loss_gain_percent"), 2, " %")


def _over_seeds(arm: dict[str, Any]) -> str:
    seeds = (arm.get("relative") or {}).get("seeds")
    if not seeds:
        return MISSING
    if seeds["low"] is None:
        return f"no interval: {seeds['no_interval']}"
    return f"{signed(seeds['low'], 4)} to {signed(seeds['high'], 4)}"


def _speed(arm: dict[str, Any]) -> str:
    text = _of("tokens_per_s", 0)(arm)
    return f"{text} *" if text != MISSING and arm["overloaded"] >= OVERLOADED else text


def _lr(arm: dict[str, Any]) -> str:
    known = [f"{lr:g}" for lr in arm["lr"] if lr is not None]
    return ", ".join(known) or MISSING


def _efficiency(arm: dict[str, Any]) -> dict[str, Any]:
    return (arm.get("relative") or {}).get("efficiency") or {}


def _needed(arm: dict[str, Any]) -> str:
    found = _efficiency(arm)
    if not found:
        return MISSING
    if found["tokens"] is None:
        return "not reached"
    partly = f" ({found['reached']} of {found['seeds']} seeds)"
    return number(found["tokens"], 0) + (partly if found["reached"] < found["seeds"] else "")


def _times_fewer(arm: dict[str, Any]) -> str:
    found = _efficiency(arm)
    if found.get("ratio") is not None:
        return f"{found['ratio']:.2f} ×"
    return MISSING


def _behind(arm: dict[str, Any]) -> str:
    behind = _efficiency(arm).get("behind")
    return f"{100 * behind:.0f} % of its tokens" if behind is not None else MISSING


def _hours_needed(arm: dict[str, Any]) -> str:
    found = _efficiency(arm)
    if found.get("hours") is None:
        return MISSING
    return f"{found['hours']:.3g}"


def _baseline_hours(relative: dict[str, Any]) -> str:
    hours = (relative.get("efficiency") or {}).get("base_hours")
    return f"baseline {hours:.3g}" if hours is not None else ""


def _flops(arm: dict[str, Any]) -> str:
    return f"{arm['flops']:.2e}" if arm["flops"] else MISSING


def _machines(arm: dict[str, Any]) -> str:
    return "; ".join(arm["machines"]) or MISSING


def _duration(arm: dict[str, Any]) -> str:
    seconds = arm["train_seconds"]
    if seconds is None:
        return MISSING
    if seconds < 600:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _steps(arm: dict[str, Any]) -> str:
    if arm["step"] == arm["planned_steps"]:
        return f"{arm['step']:,}"
    return f"{arm['step']:,} of {arm['planned_steps']:,}"


# ---------------------------------------------------------------- CSV

_RUN_COLUMNS = ("seed", "step", "planned_steps", "tokens", "validation_loss", "perplexity")
_RUN_COLUMNS += (
    "lr",
    "bits_per_byte",
    "train_loss",
    "tokens_per_s",
    "machine",
    "overloaded",
    "train_seconds",
)
_RUN_COLUMNS += ("world_size", "flops_per_token", "skipped_steps", "path")
_RELATIVE = ("validation_nats", "loss_gain_percent", "perplexity_percent", "train_nats")
_RELATIVE += ("bits_per_byte", "speed_percent", "train_seconds_percent", "parameters_percent")
_RELATIVE += ("flops_percent",)


def csv_files(report: dict[str, Any]) -> dict[str, str]:
    """Returns file name → CSV text; empty tables are omitted."""
    groups = report["groups"]
    found = {
        "runs.csv": _runs(report["runs"]),
        "arms.csv": _arms(groups),
        "curves.csv": _curves(groups),
        "frequency.csv": _frequency(groups),
        "tasks.csv": _tasks(groups),
        "sweep.csv": _sweep(groups),
    }
    return {name: csv_text(rows) for name, rows in found.items() if rows}


def _runs(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per run; `leviathan fit` reads `kind`, `parameters`, `tokens` and `loss`."""
    return [
        {
            "experiment": run["group"],
            "kind": run["arm"],
            "parameters": (run["parameters"] or {}).get("total"),
            "loss": run["validation_loss"],
            **run["sweep"],
            **{key: run[key] for key in _RUN_COLUMNS},
        }
        for run in rows
    ]


def _arms(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        for arm in group["arms"]:
            relative = arm.get("relative") or {}
            seeds, efficiency = relative.get("seeds") or {}, relative.get("efficiency") or {}
            row = {"group": group["name"], "arm": arm["label"], "swept": arm["swept"]}
            row |= {"baseline": group["baseline"], "seeds": len(arm["seeds"])}
            row |= {"parameters": (arm["parameters"] or {}).get("total")}
            row |= {key: arm[key] for key in ("tokens", "validation_loss", "perplexity")}
            row |= {key: arm[key] for key in ("seed_std", "flops", "tokens_per_s", "device_hours")}
            row |= {f"change_{key}": relative.get(key) for key in _RELATIVE}
            row |= {f"seeds_{key}": seeds.get(key) for key in ("low", "high", "p", "no_interval")}
            row |= {"lr": " ".join(f"{lr:g}" for lr in arm["lr"] if lr is not None)}
            row |= {"tokens_to_base": efficiency.get("tokens")}
            row |= {key: efficiency.get(key) for key in ("ratio", "behind", "hours", "base_hours")}
            rows.append(row | {"unequal": "; ".join(relative.get("unequal", []))})
    return rows


def _curves(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        for curve in group["curves"]:
            for what in ("train", "validation", "difference"):
                band = curve[what] or {"at": [], "mean": [], "low": [], "high": []}
                columns = (band[key] for key in ("at", "mean", "low", "high"))
                for at, mean, low, high in zip(*columns, strict=True):
                    row = {"group": group["name"], "arm": curve["label"], "curve": what}
                    rows.append(row | {"tokens": at, "mean": mean, "low": low, "high": high})
    return rows


def _frequency(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        buckets = group["frequency"] or {"runs": [], "pairs": []}
        differences = {pair["label"]: pair for pair in buckets["pairs"]}
        for run in buckets["runs"]:
            for scale in SCALES:
                for index, bucket in enumerate(run[scale]):
                    pair = differences.get(run["label"])
                    own = pair[scale][index] if pair else {}
                    row = {"group": group["name"], "arm": run["label"], "scale": scale, **bucket}
                    keys = ("difference", "low", "high", "no_interval")
                    rows.append(row | {key: own.get(key) for key in keys})
    return rows


def _tasks(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"group": group["name"], "task": row["task"], "metric": row["metric"], **cell}
        for group in groups
        for row in group["tasks"]
        for cell in row["arms"]
    ]


def _sweep(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        for arm in (group["sweep"] or {"arms": []})["arms"]:
            for index, point in enumerate(arm["points"]):
                row = {"group": group["name"], "arm": arm["label"], **point["values"]}
                row |= {key: point[key] for key in ("loss", "low", "high", "train_loss", "seeds")}
                rows.append(row | {"chosen": index == arm["best"]})
    return rows


def csv_text(rows: Iterable[dict[str, Any]]) -> str:
    """A CSV table with all keys of the rows as columns."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    """Marks text that a spreadsheet would evaluate as a formula with an apostrophe."""
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value
