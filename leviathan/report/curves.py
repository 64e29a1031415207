"""Loss curves: smoothing, means and ranges over seeds, and tokens to a given loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Centered moving average over `width` values; the window is truncated at both ends."""
    half = width // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)


def smoothing_width(points: int) -> int:
    """Odd window width of the smoothing: about 1/15 of the number of logged steps."""
    return 2 * (points // 30) + 1


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, list[float]]:
    """Mean, minimum and maximum of several curves where all of them are finite.

    Args:
        curves: (x [N], y [N]) each.

    Returns:
        `at`, `mean`, `low` and `high`, of equal length.
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
    """Difference of two curves where both have a value."""
    theirs = dict(zip(*(part.tolist() for part in base), strict=True))
    both = [
        (x, y - theirs[x])
        for x, y in zip(*(part.tolist() for part in curve), strict=True)
        if x in theirs and np.isfinite(y) and np.isfinite(theirs[x])
    ]
    return np.array([x for x, _ in both]), np.array([y for _, y in both])


def tokens_to(curve: np.ndarray, loss: float) -> float | None:
    """Number of tokens after which a curve first reaches `loss`, interpolated in log tokens.

    Args:
        curve: (tokens, loss in nats) in ascending order of tokens, `[N, 2]`.
        loss: target loss, nats per token.

    Returns:
        The number of tokens; None if the curve does not reach `loss`.
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
    """Tokens and device-hours that a run and its baseline need to reach the same loss.

    Args:
        run, base: the run and its baseline; their validation curves are used.

    Returns:
        `tokens` that `run` needs to reach the final loss of the baseline, and `ratio`, the factor
        by which they are fewer. If `run` does not reach it, both are None and `behind` is the share
        of its tokens after which the baseline had reached the final loss of `run`. `hours` and
        `base_hours` follow from the speed of each run.
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
    """Device-hours for a number of tokens at the speed of a run."""
    if tokens is None or not run.tokens_per_s:
        return None
    return tokens / run.tokens_per_s / 3600 * (run.facts.get("world_size") or 1)
