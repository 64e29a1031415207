"""Downstream tasks of arms: means over seeds, standard errors, and differences in σ."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leviathan.analysis.load_runs import RunRecord
from leviathan.evaluate.intervals import no_standard_error


def tasks_of(by_arm: Mapping[str, Sequence[RunRecord]]) -> list[dict[str, Any]]:
    """One row per task and metric: value, standard error over samples, and difference of each arm.

    `sigmas` is the difference in units of the combined standard error of two independent samples;
    this is conservative if both models answered the same questions. A standard error of too few
    samples, or of identical samples, is None, and `no_interval` states the reason.
    """
    scores = {label: _arm_scores(own) for label, own in by_arm.items()}
    keys = sorted({key for arm in scores.values() for key in arm})
    rows = []
    for key in keys:
        cells, base = [], None
        for number, (label, arm) in enumerate(scores.items()):
            cell: dict[str, Any] = {"label": label} | arm.get(key, _MISSING)
            base = cell if number == 0 else base
            if number and base and None not in (cell["value"], base["value"]):
                cell["difference"] = cell["value"] - base["value"]
                if cell["stderr"] and base["stderr"]:
                    cell["sigmas"] = cell["difference"] / math.hypot(cell["stderr"], base["stderr"])
            cells.append(cell)
        rows.append({"task": key[0], "metric": key[1], "arms": cells})
    return rows


_MISSING: dict[str, Any] = {"value": None, "stderr": None, "samples": None, "seeds": 0}


def _arm_scores(entries: Sequence[RunRecord]) -> dict[tuple[str, str], dict[str, Any]]:
    """(task, metric) → value over the evaluated seeds."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        for row in _rows(entry.run.lm_eval):
            found.setdefault((row["task"], row["metric"]), []).append(row)
    means = {}
    for key, rows in found.items():
        values = [row["value"] for row in rows if row["value"] is not None]
        errors = [row["stderr"] for row in rows if row["stderr"] is not None]
        stderr = sum(errors) / len(errors) if errors and len(errors) == len(rows) else None
        reason = no_standard_error(rows[0]["samples"], stderr) if stderr is not None else None
        means[key] = {
            "value": sum(values) / len(values) if len(values) == len(rows) else None,
            # All seeds answer the same questions, so more seeds do not add samples.
            "stderr": stderr if reason is None else None,
            "samples": rows[0]["samples"],
            "seeds": len(rows),
        } | ({"no_interval": reason} if reason else {})
    return means


def _rows(results: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Results of lm-eval as rows: task, metric, value, standard error."""
    rows = []
    for task, metrics in ((results or {}).get("results") or {}).items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            if value is not None and not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "value": value,
                    "stderr": error if isinstance(error, int | float) else None,
                    "samples": _samples(results or {}, task),
                }
            )
    return rows


def _samples(results: dict[str, Any], task: str) -> int | None:
    return ((results.get("n-samples") or {}).get(task) or {}).get("effective")
