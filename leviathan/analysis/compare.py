"""Runs side by side: whether they may be paired, and every number of the report.

The first run is the baseline. Differences are given only between runs that saw the same tokens in
the same order for the same number of steps; otherwise the page shows the runs and says why not.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.analysis.runs import Run, load_run
from leviathan.analysis.verdict import verdict
from leviathan.errors import DataError
from leviathan.evaluate.strata import SCALES, paired_difference

# Known to differ between runs that are meant to be compared, or to say nothing about the model.
_NOT_A_DIFFERENCE = ("run_dir",)


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """Reads the runs and returns every number of the report as plain JSON values.

    Raises:
        DataError: no run was given, or a folder is not a run.
    """
    if not paths:
        raise DataError("no run folder given; usage: leviathan report RUN [RUN …] --out DIR")
    runs = [load_run(Path(path)) for path in paths]
    labels = _labels(runs)
    pairing = pairing_checks(runs)
    rows = [_summary(run, label) for run, label in zip(runs, labels, strict=True)]
    frequency = _frequency(runs, labels, pairing)
    if pairing["paired"]:
        for row in rows[1:]:
            row["relative"] = _relative(rows[0], row)
    return {
        "runs": rows,
        "pairing": pairing,
        "frequency": frequency,
        "curves": [_curve(run, label) for run, label in zip(runs, labels, strict=True)],
        "config_differences": config_differences(runs),
        "verdict": verdict(rows, pairing, frequency),
    }


def pairing_checks(runs: Sequence[Run]) -> dict[str, Any]:
    """Whether all runs saw the same data, order, tokenizer and budget, check by check."""
    asked: list[tuple[str, Callable[[Run], Any]]] = [
        ("Tokenizer", lambda run: _short(run.tokenizer)),
        ("Training data", lambda run: _short(run.data)),
        ("Data order", _order),
        ("Context length", lambda run: f"{run.config['model']['seq_len']:,} tokens"),
        ("Planned budget", lambda run: f"{run.planned_steps * run.tokens_per_step:,} tokens"),
        ("Trained so far", lambda run: f"{run.step * run.tokens_per_step:,} tokens"),
        ("Evaluated at", lambda run: _step(run.evaluated_step)),
        ("Evaluated on", _evaluated_on),
    ]
    checks = []
    for name, ask in asked:
        values = [ask(run) for run in runs]
        known = all(value is not None for value in values)
        checks.append(
            {
                "check": name,
                "values": [value or "not recorded" for value in values],
                "same": len(set(values)) == 1 and (known or name.startswith("Evaluated")),
            }
        )
    failed = [check["check"].lower() for check in checks if not check["same"]]
    note = ""
    if len(runs) > 1 and failed:
        note = (
            f"These runs are not paired: they differ in {_and(failed)}, or a file that would "
            "tell is gone. They are shown side by side, and no difference between them is computed."
        )
    return {"paired": len(runs) > 1 and not failed, "checks": checks, "note": note}


def config_differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Configuration keys in which the runs differ, as dotted paths, with one value a run."""
    flat = [_flatten(run.config) for run in runs]
    keys = sorted({key for config in flat for key in config} - set(_NOT_A_DIFFERENCE))
    rows = []
    for key in keys:
        values = [config.get(key) for config in flat]
        if any(value != values[0] for value in values):
            rows.append({"key": key, "values": values})
    return rows


def _summary(run: Run, label: str) -> dict[str, Any]:
    loss = run.validation_loss
    evaluation = run.perplexity or {}
    return {
        "label": label,
        "path": str(run.path),
        "kind": run.kind,
        "step": run.step,
        "planned_steps": run.planned_steps,
        "tokens": run.step * run.tokens_per_step,
        "parameters": run.parameters,
        "train_loss": run.train_loss,
        "validation_loss": loss,
        "perplexity": float(np.exp(loss)) if loss is not None else None,
        "bits_per_byte": evaluation.get("bits_per_byte"),
        "by_subset": evaluation.get("by_subset"),
        "tokens_per_s": run.tokens_per_s,
        "train_seconds": run.train_seconds,
        "world_size": run.facts.get("world_size"),
        "skipped_steps": _skipped(run),
        "lm_eval": _tasks(run.lm_eval),
        "evaluated_step": run.evaluated_step,
    }


def _relative(base: dict[str, Any], row: dict[str, Any]) -> dict[str, float | None]:
    """Differences to the baseline; percentages are of the baseline, as the papers state them."""

    def difference(key: str) -> float | None:
        both = base[key] is not None and row[key] is not None
        return row[key] - base[key] if both else None

    def percent(key: str) -> float | None:
        gap = difference(key)
        return 100 * gap / base[key] if gap is not None and base[key] else None

    both_known = base["parameters"] and row["parameters"]
    parameters = row["parameters"]["total"] - base["parameters"]["total"] if both_known else None
    return {
        "train_nats": difference("train_loss"),
        "validation_nats": difference("validation_loss"),
        "validation_percent": percent("validation_loss"),
        "perplexity_percent": percent("perplexity"),
        "bits_per_byte": difference("bits_per_byte"),
        "speed_percent": percent("tokens_per_s"),
        "train_seconds_percent": percent("train_seconds"),
        "parameters": parameters,
        "parameters_percent": 100 * parameters / base["parameters"]["total"]
        if parameters is not None
        else None,
    }


def _tasks(results: dict[str, Any] | None) -> list[dict[str, Any]]:
    """lm-eval's results as rows: task, metric, value, standard error."""
    rows = []
    for task, metrics in ((results or {}).get("results") or {}).items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
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


def _frequency(
    runs: Sequence[Run], labels: Sequence[str], pairing: dict[str, Any]
) -> dict[str, Any] | None:
    """Loss by training frequency for the runs that have it, and the paired differences."""
    present = [(run.strata, label) for run, label in zip(runs, labels, strict=True) if run.strata]
    if not present:
        return None
    result: dict[str, Any] = {
        "runs": [
            {"label": label} | {scale: strata.table(scale) for scale in SCALES}
            for strata, label in present
            if strata
        ],
        "pairs": [],
    }
    base = runs[0].strata
    if pairing["paired"] and base is not None:
        for strata, label in present[1:]:
            if strata and strata.identity == base.identity:
                difference = paired_difference(base, strata)
                result["pairs"].append({"label": label, "base": labels[0]} | difference)
    return result


def _curve(run: Run, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "tokens_per_step": run.tokens_per_step,
        "step": run.metrics["step"].tolist(),
        "train_loss": _finite(run.metrics["loss"]),
        "validation_step": run.validation[:, 0].astype(int).tolist(),
        "validation_loss": run.validation[:, 1].tolist(),
    }


def _finite(values: np.ndarray) -> list[float | None]:
    """NaN is no JSON: a step without a loss becomes null."""
    return [value if np.isfinite(value) else None for value in values.tolist()]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Kinds where they tell the runs apart, else folder names, else paths."""
    for names in ([run.kind for run in runs], [run.path.name for run in runs]):
        if len(set(names)) == len(names):
            return names
    return [f"{run.path.name} #{number}" for number, run in enumerate(runs, start=1)]


def _order(run: Run) -> str | None:
    data = run.config.get("data", {})
    batch = run.config["train"]["global_batch_size"]
    return (
        f"seed {run.config.get('seed')}, window {data.get('shuffle_window')}, {batch} rows a step"
    )


def _evaluated_on(run: Run) -> str | None:
    data = (run.perplexity or {}).get("data") or {}
    return f"{data.get('split')} of {_short(data.get('fingerprint'))}" if data else None


def _skipped(run: Run) -> int | None:
    skipped = run.metrics.get("skipped")
    return int(np.nanmax(skipped)) if skipped is not None else None  # counted from the start


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _short(fingerprint: str | None) -> str | None:
    return fingerprint[:12] if fingerprint else None


def _step(step: int | None) -> str | None:
    return f"step {step:,}" if step is not None else None


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
