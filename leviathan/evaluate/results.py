"""lm-eval's results as JSON values and as a short table."""

import math
from typing import Any

from rich.table import Table

from leviathan.console import as_text
from leviathan.evaluate.intervals import no_standard_error


def without_nan(value: Any) -> Any:
    """lm-eval's results as JSON values: functions become their names, no NaN."""
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [without_nan(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "item"):
        return without_nan(value.item())
    return getattr(value, "__name__", str(value))


def without_unsupported_errors(metrics: dict[str, Any]) -> dict[str, Any]:
    """Sets the metrics of a task whose scores were not finite to None."""
    return {key: None if isinstance(value, float) else value for key, value in metrics.items()}


def results_table(result: dict[str, Any]) -> str:
    """lm-eval's results as a short table: task, metric, value ± standard error, samples."""
    table = Table(title="lm-eval", title_justify="left")
    for head in ("task", "metric", "value", "± stderr", "samples"):
        table.add_column(head, justify="left" if head in ("task", "metric") else "right")
    for task, metrics in result["results"].items():
        samples = (result.get("n-samples") or {}).get(task, {}).get("effective", "")
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            spread = ""
            if isinstance(error, float | int):
                spread = no_standard_error(samples, error) or f"{error:.4f}"
            table.add_row(task, metric, _shown(value), spread, str(samples))
    for task, figures in result["leviathan"].get("rolling", {}).items():
        table.add_row(task, "token perplexity", _shown(figures["perplexity"]), "", "")
    return as_text(table)


def _shown(value: Any) -> str:
    if not isinstance(value, float | int):
        return "not a number"
    return f"{value:.4f}" if abs(value) < 1e7 else f"{value:.4g}"
