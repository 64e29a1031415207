"""Statistics over seeds: mean differences with intervals and p-values."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from leviathan.evaluate import intervals


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
