"""Loss by training frequency per arm: means over seeds, and paired differences to the baseline."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from leviathan.analysis.load_runs import RunRecord
from leviathan.evaluate.frequency_buckets import SCALES, FrequencyBuckets, Scale, paired_difference


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
    """Buckets of one arm, with the loss of each document as mean over seeds; None unless all have
    it."""
    all_buckets = [entry.run.buckets for entry in entries]
    known = [buckets for buckets in all_buckets if buckets is not None]
    if len(known) < len(all_buckets) or len({buckets.identity for buckets in known}) != 1:
        return None
    nats: dict[Scale, np.ndarray] = {
        scale: np.mean([buckets.nats[scale] for buckets in known], axis=0) for scale in SCALES
    }
    return FrequencyBuckets(known[0].documents, nats, known[0].tokens, known[0].identity)
