"""Loss curves: smoothing, means over seeds with their bands, and tokens to a given loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Centerd moving mean over `width` values, over fewer at both ends."""
    half = width // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)


def smoothing_width(points: int) -> int:
    """Logged steps in one smoothed value: about a fifteenth of the curve, odd."""
    return 2 * (points // 30) + 1


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, list[float]]:
    """Mean, least and greatest value of several curves where all of them have a finite one.

    Args:
        curves: (x [N], y [N]) each.

    Returns:
        `at`, `mean`, `low`, `high`, equally long.
    """
    finite = [
        {float(x): float(y) for x, y in zip(*pair, strict=True) if np.isfinite(y)}
        for pair in curves
    ]
    shared = sorted(set.intersection(*(set(points) for points in finite))) if finite else []
    if not shared:
        return {"at": [], "mean": [], "low": [], "high": []}
    values = np.array([[points[x] for x in shared] for points in finite])
    rows = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return {"at": shared} | {name: row.tolist() for name, row in rows.items()}


def difference(
    curve: tuple[np.ndarray, np.ndarray], base: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """One curve less another where both have a value."""
    theirs = dict(zip(*(part.tolist() for part in base), strict=True))
    both = [
        (x, y - theirs[x])
        for x, y in zip(*(part.tolist() for part in curve), strict=True)
        if x in theirs and np.isfinite(y) and np.isfinite(theirs[x])
    ]
    return np.array([x for x, _ in both]), np.array([y for _, y in both])


def tokens_to(curve: np.ndarray, loss: float) -> float | None:
    """Tokens after which a curve first is at `loss` or below, interpolated in log tokens.

    Args:
        curve: rows (tokens, nats), ascending, [N, 2].
        loss: the aim.

    Returns:
        Tokens; None where the curve never comes down to it.
    """
    below = np.flatnonzero(curve[:, 1] <= loss)
    if not len(below):
        return None
    first = int(below[0])
    if first == 0:
        return float(curve[0, 0])
    (x0, y0), (x1, y1) = curve[first - 1], curve[first]
    share = (y0 - loss) / (y0 - y1)
    return float(np.exp(np.log(x0) + share * (np.log(x1) - np.log(x0))))


def efficiency(run: Any, base: Any) -> dict[str, Any]:
    """Tokens and device-hours to the same loss, of one run against its baseline.

    Args:
        run, base: `Run`s; both read from their validation curves.

    Returns:
        `tokens` of `run` to the baseline's final loss and `ratio`, how many times fewer they are;
        where it never gets there, both None and `behind`: the share of its tokens after which the
        baseline was already where `run` ends. `hours` and `base_hours`, by each one's speed.
    """
    own, theirs = run.validation_curve, base.validation_curve
    if not len(own) or not len(theirs):
        return dict.fromkeys(("tokens", "ratio", "behind", "hours", "base_hours"))
    final, spent = float(theirs[-1, 1]), float(theirs[-1, 0])
    needed = tokens_to(own, final)
    behind = None
    if needed is None:
        reached = tokens_to(theirs, float(own[-1, 1]))
        behind = reached / spent if reached is not None else None
    return {
        "tokens": needed,
        "ratio": spent / needed if needed else None,
        "behind": behind,
        "hours": _hours(run, needed),
        "base_hours": _hours(base, spent),
    }


def _hours(run: Any, tokens: float | None) -> float | None:
    """Device-hours for so many tokens at a run's own speed."""
    if tokens is None or not run.tokens_per_s:
        return None
    return tokens / run.tokens_per_s / 3600 * (run.facts.get("world_size") or 1)
