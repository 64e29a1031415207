"""Sweeps: the final loss at every value, and the best value of each arm.

The best value is the one with the lowest training loss. The validation split compares the arms; a
value chosen on that split would bias the comparison in favor of arms with more values.
"""

from collections.abc import Sequence
from typing import Any

from leviathan.analysis.load_runs import RunRecord
from leviathan.analysis.significance import mean_of

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
