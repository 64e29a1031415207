"""Sweeps: the final loss at every value, and which value suits each arm best."""

from collections.abc import Sequence
from typing import Any

from leviathan.analysis.gather import Entry
from leviathan.analysis.significance import mean_of


def sweep_of(entries: Sequence[Entry]) -> dict[str, Any] | None:
    """Validation loss by arm and swept values, mean over seeds; None without a sweep.

    Returns:
        `keys`, and `arms`: per arm its points (values, loss, low, high, seeds) in the order of the
        study, the index of the best, and whether that lies at an end of the values tried.
    """
    if not any(entry.sweep for entry in entries):
        return None
    keys = list(next(entry.sweep for entry in entries if entry.sweep))
    arms = []
    for label in dict.fromkeys(entry.arm for entry in entries):
        points = [_point(own) for own in _by_values(entries, label)]
        known = [i for i, point in enumerate(points) if point["loss"] is not None]
        best = min(known, key=lambda i: points[i]["loss"], default=None)
        arms.append({"label": label, "points": points, "best": best})
        arms[-1]["at_the_end"] = best is not None and _at_an_end(points, best, keys)
    return {"keys": keys, "arms": arms}


def best_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Of every arm, the runs at the values with its least loss (all of it, if no loss is known)."""
    kept: list[Entry] = []
    for label in dict.fromkeys(entry.arm for entry in entries):
        settings = _by_values(entries, label)
        losses = [_point(own)["loss"] for own in settings]
        known = [(loss, i) for i, loss in enumerate(losses) if loss is not None]
        kept += settings[min(known)[1]] if known else settings[0]
    return kept


def _by_values(entries: Sequence[Entry], label: str) -> list[list[Entry]]:
    settings: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.arm == label:
            settings.setdefault(entry.swept, []).append(entry)
    return list(settings.values())


def _point(entries: Sequence[Entry]) -> dict[str, Any]:
    losses = [entry.run.validation_loss for entry in entries]
    loss = mean_of(losses)
    known = [value for value in losses if value is not None]
    return {
        "values": entries[0].sweep,
        "swept": entries[0].swept,
        "loss": loss,
        "low": min(known) if loss is not None else None,
        "high": max(known) if loss is not None else None,
        "seeds": len(entries),
    }


def _at_an_end(points: Sequence[dict[str, Any]], best: int, keys: Sequence[str]) -> bool:
    """Whether the best value of a numeric key is the least or the greatest that was tried."""
    for key in keys:
        tried = [point["values"][key] for point in points]
        numbers = [value for value in tried if isinstance(value, int | float)]
        if len(numbers) < len(tried) or len(set(numbers)) < 3:
            continue
        if points[best]["values"][key] in (min(numbers), max(numbers)):
            return True
    return False
