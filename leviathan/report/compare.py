"""Comparison of runs: every number of the report, as plain JSON values.

A report has groups, which are compared separately. A group has arms, the first of which is the
baseline; an arm has one run per seed. A difference is computed between two runs that saw the same
tokens in the same order for the same number of steps; the difference of an arm is the mean over
its seeds.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.config.identity import flatten, within
from leviathan.errors import DataError
from leviathan.evaluate import intervals
from leviathan.evaluate.frequency_buckets import (
    SCALES,
    FrequencyBuckets,
    Scale,
    comparisons_of,
    paired_difference,
)
from leviathan.evaluate.intervals import no_standard_error
from leviathan.report.curves import band, difference, efficiency
from leviathan.report.pairing import Pair, pairing_of, pairs_of, with_common_losses
from leviathan.report.runs import Run, RunRecord, load_runs
from leviathan.report.summary import summarize

# ---------------------------------------------------------------- statistics over seeds


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean; None unless every value is known."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def over_seeds(differences: Sequence[float]) -> dict[str, Any]:
    """Mean of paired differences, one per seed, with Student's t interval and two-sided p.

    Returns:
        `seeds`, `mean`, `std` (two seeds or more), and `low`, `high` and `p`, or the reason
        `no_interval` why they are None.
    """
    found, std, p = intervals.over_seeds(differences)
    result = {"seeds": len(differences), "mean": mean_of(differences), "std": std, "p": p}
    return result | found.as_dict()


# ---------------------------------------------------------------- sweeps
# The best value is the one with the lowest training loss. The validation split compares the arms; a
# value chosen on that split would bias the comparison in favor of arms with more values.

CHOSEN_BY = "train_loss"


def sweep_of(entries: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Validation loss by arm and swept values, mean over seeds; None without a sweep.

    Returns:
        `keys`, `chosen_by`, and `arms`: per arm its points (values, validation `loss`, `low`,
        `high`, `train_loss`, `seeds`) in the order of the experiment, the index of the point with
        the lowest training loss, and whether it is at an end of the tested range.
    """
    if not any(entry.sweep for entry in entries):
        return None
    keys = list(next(entry.sweep for entry in entries if entry.sweep))
    arms = []
    for label in dict.fromkeys(entry.arm for entry in entries):
        points = [_point(own) for own in _by_values(entries, label)]
        best = _best(points)
        arms.append({"label": label, "points": points, "best": best})
        arms[-1]["at_the_end"] = best is not None and _at_an_end(points, best, keys)
    return {"keys": keys, "chosen_by": CHOSEN_BY, "arms": arms}


def best_entries(entries: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs of every arm at the values with the lowest training loss (default: the first)."""
    kept: list[RunRecord] = []
    for label in dict.fromkeys(entry.arm for entry in entries):
        settings = _by_values(entries, label)
        kept += settings[_best([_point(own) for own in settings]) or 0]
    return kept


def _best(points: Sequence[dict[str, Any]]) -> int | None:
    """Index of the point with the lowest training loss; None if no training loss is known."""
    known = [
        (point[CHOSEN_BY], i) for i, point in enumerate(points) if point[CHOSEN_BY] is not None
    ]
    return min(known)[1] if known else None


def _by_values(entries: Sequence[RunRecord], label: str) -> list[list[RunRecord]]:
    settings: dict[str, list[RunRecord]] = {}
    for entry in entries:
        if entry.arm == label:
            settings.setdefault(entry.swept, []).append(entry)
    return list(settings.values())


def _point(entries: Sequence[RunRecord]) -> dict[str, Any]:
    losses = [entry.run.validation_loss for entry in entries]
    loss = mean_of(losses)
    known = [value for value in losses if value is not None]
    return {
        "values": entries[0].sweep,
        "swept": entries[0].swept,
        "loss": loss,
        "train_loss": mean_of([entry.run.train_loss for entry in entries]),
        "low": min(known) if loss is not None else None,
        "high": max(known) if loss is not None else None,
        "seeds": len(entries),
    }


def _at_an_end(points: Sequence[dict[str, Any]], best: int, keys: Sequence[str]) -> bool:
    """Whether the best value of a numeric key is the minimum or maximum of the tested values."""
    for key in keys:
        tried = [point["values"][key] for point in points]
        numbers = [value for value in tried if isinstance(value, int | float)]
        if len(numbers) < len(tried) or len(set(numbers)) < 3:
            continue
        if points[best]["values"][key] in (min(numbers), max(numbers)):
            return True
    return False


# ---------------------------------------------------------------- tasks


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


# ---------------------------------------------------------------- loss by training frequency


def frequency_of(
    by_arm: Mapping[str, Sequence[RunRecord]], paired: Collection[str]
) -> dict[str, Any] | None:
    """Frequency tables of the arms that have them, and their differences to the first arm.

    Args:
        by_arm: runs by arm, the baseline first.
        paired: arms that are comparable with the baseline.
    """
    present = {label: buckets for label, own in by_arm.items() if (buckets := _mean(own))}
    if not present:
        return None
    result: dict[str, Any] = {
        "runs": [
            {"label": label} | {scale: buckets.table(scale) for scale in SCALES}
            for label, buckets in present.items()
        ],
        "pairs": [],
    }
    baseline = next(iter(by_arm))
    base = present.get(baseline)
    for label, buckets in present.items():
        if label in paired and base is not None and buckets.identity == base.identity:
            difference = paired_difference(base, buckets)
            result["pairs"].append({"label": label, "base": baseline} | difference)
    return result


def _mean(entries: Sequence[RunRecord]) -> FrequencyBuckets | None:
    """Buckets of one arm, averaged over seeds per document; None unless all runs have them."""
    all_buckets = [entry.run.buckets for entry in entries]
    known = [buckets for buckets in all_buckets if buckets is not None]
    if len(known) < len(all_buckets) or len({buckets.identity for buckets in known}) != 1:
        return None
    nats: dict[Scale, np.ndarray] = {
        scale: np.mean([buckets.nats[scale] for buckets in known], axis=0) for scale in SCALES
    }
    return FrequencyBuckets(known[0].documents, nats, known[0].tokens, known[0].identity)


# ---------------------------------------------------------------- comparison

# Expected to differ between compared runs, or without effect on the model.
_NOT_A_DIFFERENCE = ("run_dir",)
# Keys that may differ between the runs of one arm: they affect speed and rounding errors only.
_COMPUTED_DIFFERENTLY = ("engine", "parallel", "model.embedding.tp_mode", "train.micro_batch_size")


def compare(paths: Sequence[Path], allow_unequal: bool = False) -> dict[str, Any]:
    """Reads the runs and returns every number of the report as plain JSON values.

    Args:
        paths: run directories, the baseline first; or one experiment.
        allow_unequal: also compare runs that differ in data, order, tokenizer or budget.

    Raises:
        DataError: no run was given, a directory is not a run, or no two runs are comparable.
        ConfigError: the experiment file cannot be read.
    """
    gathered = load_runs(paths)
    names = list(dict.fromkeys(entry.group for entry in gathered.entries))
    groups = []
    for name in names:
        entries = [entry for entry in gathered.entries if entry.group == name]
        groups.append(_group(name, entries, allow_unequal))
    if not gathered.is_experiment:
        _check_comparable(groups[0])
    report = {
        "title": gathered.title or _title(groups[0]),
        "question": gathered.question,
        "caution": gathered.caution,
        "missing": list(gathered.missing),
        "groups": groups,
        "runs": [row for group in groups for row in group["runs"]],
    }
    return report | {"summary": summarize(report)}


def config_differences(entries: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Configuration keys in which the runs differ, as dotted paths, with one value per run."""
    flat = [flatten(entry.run.config) for entry in entries]
    keys = sorted({key for config in flat for key in config} - set(_NOT_A_DIFFERENCE))
    rows = []
    for key in keys:
        values = [config.get(key) for config in flat]
        if any(value != values[0] for value in values):
            rows.append({"key": key, "values": values})
    return rows


def _title(group: dict[str, Any]) -> str:
    labels = [arm["label"] for arm in group["arms"]]
    return " vs ".join(reversed(labels)) if len(labels) == 2 else ", ".join(labels)


def _check_comparable(group: dict[str, Any]) -> None:
    pairing = group["pairing"]
    if len(group["arms"]) < 2 or pairing["pairs"]:
        return
    refused = "\n".join(
        f"  {pair['run']} against {pair['baseline']}: {'; '.join(pair['found'])}"
        for pair in pairing["unequal"]
    )
    raise DataError(
        "report.not_comparable",
        f"no two of these runs can be compared fairly:\n{refused}\nTrain them on the same data "
        "with the same seed and budget, evaluate them with the same `leviathan perplexity RUN "
        "DATA`, or pass --allow-unequal to compare them anyway",
    )


def _group(name: str, entries: Sequence[RunRecord], allow_unequal: bool) -> dict[str, Any]:
    """Compares the arms of one group; a swept arm is represented by its best values."""
    entries, loss_note = with_common_losses(entries)
    swept = sweep_of(entries)
    kept = best_entries(entries) if swept else list(entries)
    pairs = pairs_of(kept)
    pairing = pairing_of(kept, pairs, allow_unequal)
    counted = [pair for pair in pairs if pair.counts(allow_unequal)]
    labels = list(dict.fromkeys(entry.arm for entry in sorted(kept, key=lambda e: not e.baseline)))
    by_arm = {label: [entry for entry in kept if entry.arm == label] for label in labels}
    arms = [
        _arm(label, own, [pair for pair in counted if pair.entry.arm == label])
        for label, own in by_arm.items()
    ]
    for arm in arms[1:]:
        arm["relative"] = _relative(arms[0], arm, counted)
    frequency = frequency_of(by_arm, {pair.entry.arm for pair in counted})
    tasks = tasks_of(by_arm)
    return {
        "name": name,
        "baseline": labels[0] if kept[0].baseline or any(e.baseline for e in kept) else None,
        "arms": arms,
        "runs": [_run_row(entry) for entry in entries],
        "pairing": pairing,
        "loss_note": loss_note,
        "frequency": frequency,
        "tasks": tasks,
        "comparisons": _comparisons(arms, frequency, tasks),
        "curves": [_curve(label, own, counted) for label, own in by_arm.items()],
        "sweep": swept,
        "config_differences": config_differences([own[0] for own in by_arm.values()]),
    }


def _comparisons(
    arms: Sequence[dict[str, Any]], frequency: dict[str, Any] | None, tasks: Sequence[Any]
) -> dict[str, int]:
    """Number of differences in each table of a group that have an interval or a multiple of σ."""
    over_seeds = [(arm["relative"] or {}).get("seeds") for arm in arms[1:]]
    cells = [cell for task in tasks for cell in task["arms"]]
    return {
        "arms": sum(arm["relative"] is not None for arm in arms[1:]),
        "seeds": sum(seeds is not None and seeds["low"] is not None for seeds in over_seeds),
        "frequency": comparisons_of(frequency["pairs"]) if frequency else 0,
        "tasks": sum(cell.get("sigmas") is not None for cell in cells),
    }


def _run_row(entry: RunRecord) -> dict[str, Any]:
    """Configuration, results and costs of one run."""
    run = entry.run
    loss, evaluation = run.validation_loss, run.perplexity or {}
    return {
        "group": entry.group,
        "arm": entry.arm,
        "sweep": entry.sweep,
        "seed": run.seed,
        "path": str(run.path),
        "kind": run.kind,
        "lr": run.lr,
        "step": run.step,
        "planned_steps": run.planned_steps,
        "tokens": run.step * run.tokens_per_step,
        "parameters": run.parameters,
        "flops_per_token": run.flops_per_token,
        "train_loss": run.train_loss,
        "validation_loss": loss,
        "perplexity": float(np.exp(loss)) if loss is not None else None,
        "bits_per_byte": run.bits_per_byte,
        "by_subset": evaluation.get("by_subset"),
        "tokens_per_s": run.tokens_per_s,
        "machine": run.machine,
        "overloaded": run.overloaded,
        "train_seconds": run.train_seconds,
        "world_size": run.facts.get("world_size"),
        "skipped_steps": _skipped(run),
        "evaluated_step": run.loss_step,
    }


def _arm(label: str, entries: Sequence[RunRecord], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Figures of an arm (means over its seeds) and its pairs with the baseline."""
    rows = [_run_row(entry) for entry in entries]
    first = rows[0]
    means = {
        key: mean_of([row[key] for row in rows])
        for key in (
            "train_loss",
            "validation_loss",
            "bits_per_byte",
            "tokens_per_s",
            "train_seconds",
        )
    }
    loss, per_token = means["validation_loss"], first["flops_per_token"]
    machines = list(dict.fromkeys(row["machine"] for row in rows if row["machine"]))
    return {
        "label": label,
        "swept": entries[0].swept,
        "seeds": [row["seed"] for row in rows],
        "lr": list(dict.fromkeys(row["lr"] for row in rows)),
        "differs_within": [
            row["key"]
            for row in config_differences(entries)
            if within(row["key"], _COMPUTED_DIFFERENTLY)
        ],
        **{key: first[key] for key in ("kind", "step", "planned_steps", "tokens", "parameters")},
        **means,
        "perplexity": float(np.exp(loss)) if loss is not None else None,
        "seed_std": over_seeds([row["validation_loss"] or np.nan for row in rows])["std"]
        if loss is not None
        else None,
        "flops_per_token": per_token,
        "flops": per_token * first["tokens"] if per_token else None,
        "device_hours": _device_hours(means["train_seconds"], first["world_size"]),
        "machines": machines,
        "overloaded": max((row["overloaded"] or 0 for row in rows), default=0),
        "skipped_steps": max((row["skipped_steps"] or 0 for row in rows), default=0),
        "by_subset": _subsets([row["by_subset"] for row in rows]),
        "pairs": [_pair(pair) for pair in pairs],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    run, base = pair.entry.run, pair.base.run
    return {
        "seed": run.seed,
        "run": str(run.path),
        "base": str(base.path),
        "unequal": list(pair.differs),
        "validation_nats": _improvement(run.validation_loss, base.validation_loss),
        "efficiency": efficiency(run, base),
    }


def _relative(
    base: dict[str, Any], arm: dict[str, Any], counted: Sequence[Pair]
) -> dict[str, Any] | None:
    """Mean differences to the baseline over the paired seeds; None if there are none.

    Percentages are relative to the baseline, as in the papers: `loss_gain_percent` is positive if
    the arm is better, `perplexity_percent` negative.
    """
    pairs = [pair for pair in counted if pair.entry.arm == arm["label"]]
    if not pairs:
        return None
    runs, bases = [pair.entry.run for pair in pairs], [pair.base.run for pair in pairs]

    def mean(name: str, of: Sequence[Run]) -> float | None:
        return mean_of([getattr(run, name) for run in of])

    def gap(name: str) -> float | None:
        return _improvement(mean(name, runs), mean(name, bases))

    def percent(name: str) -> float | None:
        change, whole = gap(name), mean(name, bases)
        return 100 * change / whole if change is not None and whole else None

    nats, loss_percent = gap("validation_loss"), percent("validation_loss")
    known = [row["validation_nats"] for row in arm["pairs"] if row["validation_nats"] is not None]
    machines = {run.facts.get("machine") for run in (*runs, *bases)}
    same_machine = len(machines) == 1
    return {
        "train_nats": gap("train_loss"),
        "validation_nats": nats,
        "validation_percent": loss_percent,
        "loss_gain_percent": -loss_percent if loss_percent is not None else None,
        "perplexity_percent": 100 * float(np.expm1(nats)) if nats is not None else None,
        "bits_per_byte": gap("bits_per_byte"),
        "speed_percent": percent("tokens_per_s") if same_machine else None,
        "train_seconds_percent": percent("train_seconds") if same_machine else None,
        **_size_changes(base, arm),
        "seeds": over_seeds(known),
        "efficiency": _mean_efficiency([row["efficiency"] for row in arm["pairs"]]),
        "unequal": sorted({name for pair in pairs for name in pair.differs}),
    }


def _improvement(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _size_changes(base: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
    both_known = base["parameters"] and arm["parameters"]
    parameters = arm["parameters"]["total"] - base["parameters"]["total"] if both_known else None
    flops = (arm["flops_per_token"], base["flops_per_token"])
    return {
        "parameters": parameters,
        "parameters_percent": 100 * parameters / base["parameters"]["total"]
        if parameters is not None
        else None,
        "flops_percent": 100 * (flops[0] / flops[1] - 1) if None not in flops else None,
    }


def _mean_efficiency(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds in which the baseline's loss was reached (`reached` of `seeds`)."""
    reached = [row for row in pairs if row["ratio"] is not None]
    behind = [row["behind"] for row in pairs if row["behind"] is not None]
    means = {
        key: mean_of([row[key] for row in reached])
        for key in ("tokens", "ratio", "hours", "base_hours")
    }
    return {
        "seeds": len(pairs),
        "reached": len(reached),
        **means,
        "behind": mean_of(behind) if not reached else None,
    }


def _curve(label: str, entries: Sequence[RunRecord], counted: Sequence[Pair]) -> dict[str, Any]:
    """Training and validation loss over tokens, and the paired difference: means and ranges."""

    def train(run: Run) -> tuple[np.ndarray, np.ndarray]:
        return run.metrics["step"] * float(run.tokens_per_step), run.metrics["loss"]

    runs = [entry.run for entry in entries]
    held = [run.validation for run in runs]
    gaps = [
        difference(train(pair.entry.run), train(pair.base.run))
        for pair in counted
        if pair.entry.arm == label
    ]
    gaps = [gap for gap in gaps if len(gap[0])]
    return {
        "label": label,
        "seeds": len(runs),
        "train": band([train(run) for run in runs]),
        "validation": band(
            [(v[:, 0] * run.tokens_per_step, v[:, 1]) for v, run in zip(held, runs, strict=True)]
        ),
        "difference": band(gaps) if gaps else None,
    }


def _device_hours(seconds: float | None, world_size: int | None) -> float | None:
    return seconds * (world_size or 1) / 3600 if seconds is not None else None


def _subsets(tables: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Loss by subset, mean over seeds."""
    known = [table for table in tables if table]
    if not known:
        return None
    return {
        name: {
            "tokens": row.get("tokens", 0),
            "nats_per_token": mean_of(
                [table.get(name, {}).get("nats_per_token") for table in known]
            ),
        }
        for name, row in known[0].items()
    }


def _skipped(run: Run) -> int | None:
    skipped = run.metrics.get("skipped")
    return int(np.nanmax(skipped)) if skipped is not None else None  # counted from the start
