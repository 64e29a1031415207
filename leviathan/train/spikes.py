"""Loss spikes: steps whose loss is far above the previously logged losses."""

import math
import statistics
from collections.abc import Sequence

WINDOW = 100  # number of logged losses in the running median
MIN_LOSSES = 20  # minimum number of losses for a threshold
FLOOR = 0.01  # minimum deviation as a fraction of the median, for nearly constant losses
SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution


def spike_threshold(losses: Sequence[float], deviations: float) -> float:
    """The loss above which a step is a spike: running median + `deviations` robust deviations.

    It depends only on the logged losses, so that an interrupted run warns at the same steps as an
    uninterrupted one. Median and median absolute deviation are robust to earlier spikes.

    Args:
        losses: finite logged losses in nats per token, oldest first; the last `WINDOW` are used.
        deviations: threshold in robust deviations; 0 disables the check.

    Returns:
        The threshold; infinity if disabled or with fewer than `ENOUGH` losses.
    """
    recent = list(losses)[-WINDOW:]
    if deviations == 0 or len(recent) < MIN_LOSSES:
        return math.inf
    median = statistics.median(recent)
    deviation = SIGMA * statistics.median([abs(loss - median) for loss in recent])
    return median + deviations * max(deviation, FLOOR * abs(median))
