"""Loss spikes: a step whose loss stands out from the losses logged before it."""

import math
import statistics
from collections.abc import Sequence

WINDOW = 100  # logged losses that are looked back upon
MIN_LOSSES = 20  # of them, before anything can stand out
FLOOR = 0.01  # of the median: a loss that hardly moves has no spikes of thousandths
SIGMA = 1.4826  # times the median absolute deviation: a normal distribution's standard deviation


def spike_threshold(losses: Sequence[float], deviations: float) -> float:
    """The loss above which a step is a spike: running median + `deviations` robust deviations.

    A function of the logged losses alone, so that an interrupted run warns where the undisturbed
    one does. Median and median absolute deviation are not moved by earlier spikes.

    Args:
        losses: nats per token, finite, as logged, oldest first; the last `WINDOW` count.
        deviations: how far off is too far; 0 never warns.

    Returns:
        Infinity where nothing can be said: switched off, or fewer than `ENOUGH` losses.
    """
    recent = list(losses)[-WINDOW:]
    if deviations == 0 or len(recent) < MIN_LOSSES:
        return math.inf
    median = statistics.median(recent)
    deviation = SIGMA * statistics.median([abs(loss - median) for loss in recent])
    return median + deviations * max(deviation, FLOOR * abs(median))
