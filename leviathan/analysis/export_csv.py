"""The numbers of the report as CSV tables, for further analysis."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from leviathan.evaluate.frequency_buckets import SCALES

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
    return {name: _text(rows) for name, rows in found.items() if rows}


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


def _text(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
