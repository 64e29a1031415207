"""What several seeds say: mean differences with intervals, and how far they may be luck."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean, None unless every value is known."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def over_seeds(differences: Sequence[float]) -> dict[str, Any]:
    """Mean of paired differences, one a seed, with Student's interval and two-sided p.

    Returns:
        `seeds`, `mean`, and from two seeds on `std`, `low`, `high`, `p`; None before.
    """
    count = len(differences)
    result: dict[str, Any] = {"seeds": count, "mean": mean_of(differences)}
    result |= dict.fromkeys(("std", "low", "high", "p"))
    if count < 2:
        return result
    values = np.asarray(differences, dtype=float)
    std = float(values.std(ddof=1))
    if std == 0:
        return result | {"std": 0.0}
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * std / np.sqrt(count)
    mean = float(values.mean())
    p = float(2 * stats.t.sf(abs(mean) / (std / np.sqrt(count)), count - 1))
    return result | {"std": std, "low": mean - half, "high": mean + half, "p": p}
