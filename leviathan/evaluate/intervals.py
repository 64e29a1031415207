"""Confidence intervals: when they are shown, and their computation over seeds and documents.

Every interval and every statement that two quantities differ is checked by `no_interval`. With too
few observations an interval is too narrow and a conclusion unreliable, so the reason is shown
instead. Uses only numpy and scipy, so that the report does not need torch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
MIN_SPARE = 3  # minimum of observations minus parameters, for a fit or a mean over seeds
MIN_SAMPLED = 10  # minimum number of documents or samples for a mean

Unit = Literal["row", "seed", "document", "sample"]


@dataclass(frozen=True)
class Interval:
    """The ends of an interval, or the reason why there is none."""

    low: float | None
    high: float | None
    no_interval: str | None = None

    @classmethod
    def none(cls, reason: str) -> "Interval":
        """No interval, with the reason."""
        return cls(None, None, reason)

    @property
    def excludes_zero(self) -> bool | None:
        """Whether the interval excludes zero; None if there is no interval."""
        if self.no_interval is not None or self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0

    def as_dict(self) -> dict[str, Any]:
        """`low`, `high` and `no_interval`, as JSON values."""
        return asdict(self)


def no_interval(
    unit: Unit, observations: int, parameters: int = 0, spread: float | None = None
) -> str | None:
    """Why an interval is not shown; None if it is.

    Args:
        unit: unit of observation. Rows and seeds need `MIN_SPARE` observations more than
            parameters; documents and samples need `MIN_SAMPLED` observations.
        observations: number of observations.
        parameters: number of estimated parameters; 1 for a mean over seeds.
        spread: variation of the observations; 0 gives no estimate of their noise.
    """
    sampled = unit in ("document", "sample")
    needed = MIN_SAMPLED if sampled else parameters + MIN_SPARE
    if observations < needed:
        return f"{observations} {unit}{'s' * (observations != 1)}; {needed} needed"
    if spread is not None and not spread > 0:
        return f"all {observations} {unit}s are identical, so their noise is unknown"
    return None


def no_standard_error(samples: Any, error: float) -> str | None:
    """Why the standard error of a mean over samples is not shown; None if it is.

    Args:
        samples: number of samples; not an integer if it was not recorded.
        error: the standard error.
    """
    if isinstance(samples, int) and not isinstance(samples, bool):
        return no_interval("sample", samples, spread=error)
    return None if error > 0 else "all samples are identical, so their noise is unknown"


def over_seeds(differences: Sequence[float]) -> tuple[Interval, float | None, float | None]:
    """Student's t interval of the mean of paired differences, one per seed.

    Returns:
        The interval, the standard deviation and the two-sided p-value; the latter two are None if
        unknown.
    """
    values, count = np.asarray(differences, dtype=float), len(differences)
    std = float(values.std(ddof=1)) if count > 1 else None
    scale = np.finfo(float).eps * float(np.abs(values).max(initial=0.0))
    spread = std if std is None or std > 4 * scale else 0.0
    reason = no_interval("seed", count, 1, spread)
    if reason is not None or std is None:
        return Interval.none(reason or ""), spread, None
    mean, error = float(values.mean()), std / np.sqrt(count)
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, count - 1))
    return Interval(mean - half, mean + half), std, p


def over_documents(sums: np.ndarray, tokens: np.ndarray) -> Interval:
    """Interval of Σ sums / Σ tokens with documents as independent observations.

    Long documents have more influence on the mean. Each residual is therefore divided by one minus
    the share of its document (jackknife correction), and the degrees of freedom of Student's t are
    reduced according to the shares.

    Args:
        sums: sum per document, `[N]`.
        tokens: number of tokens per document, `[N]`; documents without tokens are ignored.

    Source: Bell and McCaffrey 2002, "Bias reduction in standard errors for linear regression with
    multi-stage samples" (CR3; Satterthwaite's degrees of freedom).
    """
    sums, tokens = sums[tokens > 0].astype(float), tokens[tokens > 0].astype(float)
    if not len(sums):
        return Interval.none(no_interval("document", 0) or "")
    share = tokens / tokens.sum()
    mean = sums.sum() / tokens.sum()
    residual = sums / tokens - mean
    scale = np.abs(sums / tokens).max()
    spread = float(np.abs(residual).max())
    reason = no_interval(
        "document", len(sums), spread=spread if spread > 1e-12 * max(scale, 1e-300) else 0.0
    )
    if reason is not None:
        return Interval.none(reason)
    variance = float(((share * residual / (1 - share)) ** 2).sum())
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, _freedom(share)) * np.sqrt(variance)
    return Interval(float(mean - half), float(mean + half))


def _freedom(share: np.ndarray) -> float:
    """Degrees of freedom of the variance in `over_documents`, assuming equal noise per document.

    The variance is e'Ae with A = D − d s' − s d' + S s s', where D = diag(d) are the weights of the
    squared residuals, S their sum and s the shares: 2·E²/Var is tr(A)² / tr(A²).
    """
    d = (share / (1 - share)) ** 2
    total, dd, ss, ds = d.sum(), d @ d, share @ share, d @ share
    trace = total - 2 * ds + total * ss
    squared = dd - 2 * (2 * (d * d) @ share - total * (d @ (share * share)))
    squared += 2 * dd * ss + 2 * ds**2 - 4 * total * ss * ds + (total * ss) ** 2
    return max(1.0, float(trace**2 / squared))


def comparisons_note(count: int, outcome: str = "have an interval that excludes zero") -> str:
    """Number of comparisons in a table and the expected number of false positives.

    Args:
        count: number of comparisons at level `CONFIDENCE`; one comparison needs no note.
        outcome: verb phrase for a false positive.
    """
    if count < 2:
        return ""
    expected = (1 - CONFIDENCE) * count
    return (
        f"{count} comparisons, not corrected for multiple comparisons: without any difference, "
        f"about {expected:.2g} of them would {outcome} by chance."
    )
