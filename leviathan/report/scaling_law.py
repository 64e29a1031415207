"""Scaling laws: L = E + A·N^-α + B·D^-β by robust regression, with intervals.

N is the number of parameters, D that of training tokens, L the loss in nats per token, and E the
irreducible loss. If a table varies only one of N and D, or both along one line, it determines only
one power law.

Source: Hoffmann et al. 2022 (arXiv 2203.15556), approach 3: Huber loss on log L, many starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from leviathan.evaluate.intervals import CONFIDENCE, no_interval

# ---------------------------------------------------------------- regression
# A set is a starting point or a bootstrap replicate; hundreds of sets are fitted as arrays.

HUBER_DELTA = 1e-3  # of log L; the cost of larger residuals is linear
NO_FLOOR = 1e-4  # nats; a lower floor counts as 0
EXPONENT_BOUNDS = (0.01, 4.0)
SCALE_BOUNDS = (-20.0, 20.0)  # of log s
ITERATIONS = 80
_DAMPING = (1e-9, 1e3)  # minimum and maximum, relative to the curvature
_RIDGE = 1e-12  # keeps the system solvable in directions without curvature


def minimize(
    starts: np.ndarray,
    targets: np.ndarray,
    axes: Sequence[np.ndarray],
    floor: bool,
    iterations: int = ITERATIONS,
) -> tuple[np.ndarray, np.ndarray]:
    """Levenberg–Marquardt method with Huber weights, independently for every set.

    Args:
        starts: initial parameters `[sets, parameters]`: log E if `floor`, then log s and p of every
            axis.
        targets: log L `[sets, rows]`.
        axes: log x of the rows, one array `[rows]` per axis.
        floor: whether E is free; otherwise it is 0.
        iterations: number of steps.

    Returns:
        The parameters `[sets, parameters]` and the Huber cost `[sets]` of each set's optimum.
    """
    low, high = _bounds(targets, len(axes), floor)
    vectors = np.clip(starts, low, high)
    predicted, jacobian = _predict(vectors, axes, floor)
    residuals = predicted - targets
    costs, damping = _cost(residuals), np.full(len(vectors), 1e-3)
    identity = np.eye(vectors.shape[1])
    for _ in range(iterations):
        weighted = jacobian / np.maximum(1.0, np.abs(residuals) / HUBER_DELTA)[..., None]
        curvature = np.swapaxes(jacobian, 1, 2) @ weighted
        slope = (weighted * residuals[..., None]).sum(1)
        scale = np.einsum("bii->bi", curvature).max(1)
        damped = curvature + (damping * scale + _RIDGE)[:, None, None] * identity
        tried = np.clip(vectors - np.linalg.solve(damped, slope[..., None])[..., 0], low, high)
        predicted, slopes = _predict(tried, axes, floor)
        cost = _cost(predicted - targets)
        better = cost < costs
        vectors[better], costs[better] = tried[better], cost[better]
        residuals[better], jacobian[better] = (predicted - targets)[better], slopes[better]
        damping = np.clip(np.where(better, damping / 5, damping * 4), *_DAMPING)
    return vectors, costs


def _bounds(targets: np.ndarray, axes: int, floor: bool) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the parameters; the floor is between 0 and the lowest loss."""
    low = np.tile([SCALE_BOUNDS[0], EXPONENT_BOUNDS[0]] * axes, (len(targets), 1))
    high = np.tile([SCALE_BOUNDS[1], EXPONENT_BOUNDS[1]] * axes, (len(targets), 1))
    if floor:
        least = np.full((len(targets), 1), np.log(NO_FLOOR) - 1)
        most = np.maximum(targets.min(1, keepdims=True) - 1e-9, least + 1e-9)
        low, high = np.hstack([least, low]), np.hstack([most, high])
    return low, high


def _predict(
    vectors: np.ndarray, axes: Sequence[np.ndarray], floor: bool
) -> tuple[np.ndarray, np.ndarray]:
    """log L `[sets, rows]` and its derivatives `[sets, rows, parameters]`."""
    first = int(floor)
    rows = len(axes[0])
    parts = [np.broadcast_to(vectors[:, :1], (len(vectors), rows))] * first
    for index, log in enumerate(axes):
        at = first + 2 * index
        parts.append(vectors[:, at, None] - vectors[:, at + 1, None] * log)
    stacked = np.stack(parts)
    top = stacked.max(0)
    weights = np.exp(stacked - top)
    total = weights.sum(0)
    weights /= total
    columns = [weights[0]] * first
    for index, log in enumerate(axes):
        columns += [weights[first + index], -weights[first + index] * log]
    return top + np.log(total), np.stack(columns, axis=-1)


def _cost(residuals: np.ndarray) -> np.ndarray:
    size = np.abs(residuals)
    linear = HUBER_DELTA * (size - HUBER_DELTA / 2)
    return np.where(size <= HUBER_DELTA, size**2 / 2, linear).sum(-1)


# ---------------------------------------------------------------- laws

Form = Literal["n", "d", "nd"]
FORMS: dict[Form, str] = {
    "n": "L = E + A·N^-α",
    "d": "L = E + B·D^-β",
    "nd": "L = E + A·N^-α + B·D^-β",
}
REPLICATES = 1000
_REFIT_ITERATIONS = 40  # smaller than for a fit: a refit starts at the fitted law
EXACT = 1e-9  # of log L; a smaller scatter is rounding error
_LEAST_SCALE = 1e-6  # nats
_EXPONENTS = (0.15, 0.3, 0.5, 0.9)
_FLOORS = (0.0, 0.3, 0.6, 0.8, 0.95)  # of the least loss


@dataclass(frozen=True)
class Points:
    """Rows of a table, `[R]` each: parameters, tokens, loss, and rounding of the loss (±)."""

    parameters: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    rounding: np.ndarray

    def __len__(self) -> int:
        return len(self.loss)

    def with_loss(self, loss: np.ndarray) -> "Points":
        """The same rows with other losses."""
        return replace(self, loss=loss)


@dataclass(frozen=True)
class Law:
    """A fitted law. `terms` are (scale, exponent) of N and D; None for terms that the form lacks.

    A scale is the loss that the term contributes at `unit`, the geometric mean of N or D over the
    rows: A and B of the formula are very large and hard to interpret.
    """

    form: Form
    floor: float
    terms: tuple[tuple[float, float] | None, tuple[float, float] | None]
    units: tuple[float, float]
    cost: float

    def loss(self, parameters: Any, tokens: Any) -> np.ndarray:
        """L at N and D, nats per token."""
        total = np.asarray(self.floor, dtype=float)
        for value, term, unit in zip((parameters, tokens), self.terms, self.units, strict=True):
            if term is not None:
                total = total + term[0] * (np.asarray(value, dtype=float) / unit) ** -term[1]
        return total

    def reaching(self, axis: Literal["n", "d"], loss: float, other: float) -> float | None:
        """The N (or D) at which the law predicts `loss`, given the other variable.

        None if the loss is not reached: it is below the floor plus the other term.
        """
        index = 0 if axis == "n" else 1
        term = self.terms[index]
        assert term is not None, f"{self.form} has no term in {axis}"
        rest, left = self.terms[1 - index], loss - self.floor
        if rest is not None:
            left -= rest[0] * (other / self.units[1 - index]) ** -rest[1]
        return float(self.units[index] * (left / term[0]) ** (-1 / term[1])) if left > 0 else None

    def named(self) -> dict[str, float]:
        """E, α, β and the coefficients A, B of the form."""
        values = {"E": self.floor}
        pairs = (("A", "alpha"), ("B", "beta"))
        for names, term, unit in zip(pairs, self.terms, self.units, strict=True):
            if term is not None:
                values[names[0]] = float(term[0] * unit ** term[1])
                values[names[1]] = term[1]
        return values


def free_parameters(form: Form, floor: bool = True) -> int:
    """Number of free parameters of a form."""
    return 2 * len(form) + floor


def fit(points: Points, form: Form, floor: bool = True) -> Law:
    """The law with the lowest Huber cost over many starts.

    Args:
        points: at least as many rows as the form has free parameters.
        form: terms of the law.
        floor: False fixes E = 0, a plain power law.
    """
    axes, units = _axes(points, form)
    target = np.log(points.loss)
    starts = _starts(points.loss, axes, floor)
    vectors, costs = minimize(starts, np.tile(target, (len(starts), 1)), axes, floor)
    best = int(costs.argmin())
    return _law(vectors[best], form, floor, units, float(costs[best]))


@dataclass(frozen=True)
class BootstrapFits:
    """Samples of a law, given the scatter of its rows: refits to losses drawn around the law.

    Attributes:
        laws: one per replicate.
        noise: standard deviation of log L around the law, `[replicates]`; it also applies to a new
            row.
    """

    laws: tuple[Law, ...]
    noise: np.ndarray


def residual_scatter(points: Points, law: Law, floor: bool = True) -> float:
    """Standard deviation of log L around the law; 0 if there are no spare rows to estimate it."""
    spare = len(points) - free_parameters(law.form, floor)
    residuals = np.log(points.loss) - np.log(law.loss(points.parameters, points.tokens))
    return float(np.sqrt((residuals**2).sum() / spare)) if spare > 0 else 0.0


def no_fit_interval(points: Points, law: Law, floor: bool = True) -> str | None:
    """Why the parameters of a law have no interval; None if they have one."""
    spread = residual_scatter(points, law, floor)
    exact = spread <= EXACT and not points.rounding.any()
    return no_interval("row", len(points), free_parameters(law.form, floor), 0.0 if exact else None)


def bootstrap(
    points: Points, law: Law, floor: bool = True, replicates: int = REPLICATES, seed: int = 0
) -> BootstrapFits:
    """Laws fitted to losses sampled around `law`: normal noise of its scatter, and rounding errors.

    A few residuals are too few to resample, and their standard deviation is itself uncertain. Each
    replicate therefore samples the standard deviation from its distribution for this number of
    spare rows (scaled inverse χ²), so the intervals have the width of Student's t. Requires at
    least one spare row.
    """
    random = np.random.default_rng(seed)
    spare = len(points) - free_parameters(law.form, floor)
    noise = residual_scatter(points, law, floor) * np.sqrt(
        spare / random.chisquare(spare, replicates)
    )
    expected = np.log(law.loss(points.parameters, points.tokens))
    shape = (replicates, len(points))
    drawn = np.exp(expected + random.normal(size=shape) * noise[:, None])
    drawn = np.maximum(drawn + random.uniform(-1, 1, shape) * points.rounding, NO_FLOOR)
    axes, _ = _axes(points, law.form, law.units)
    start = np.tile(_vector(law, floor), (replicates, 1))
    vectors, costs = minimize(start, np.log(drawn), axes, floor, _REFIT_ITERATIONS)
    pairs = zip(vectors, costs.tolist(), strict=True)
    return BootstrapFits(
        tuple(_law(v, law.form, floor, law.units, cost) for v, cost in pairs), noise
    )


def interval(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Percentile interval; an end that is not reached (None) stays None."""
    tail = (1 - CONFIDENCE) / 2
    numbers = np.sort([np.inf if value is None else value for value in values])
    if not len(numbers):
        return None, None
    ends = np.quantile(numbers, [tail, 1 - tail], method="nearest")
    low, high = (float(end) if np.isfinite(end) else None for end in ends)
    return low, high


def line_of(points: Points) -> float | None:
    """Exponent γ if D = c·N^γ over all rows (within 15 %): N and D are confounded; else None."""
    n, d = np.log(points.parameters), np.log(points.tokens)
    if np.ptp(n) < 1e-9 or np.ptp(d) < 1e-9:
        return None
    slope, intercept = np.polyfit(n, d, 1)
    return float(slope) if np.abs(d - slope * n - intercept).max() < 0.15 else None


def _axes(
    points: Points, form: Form, units: tuple[float, float] | None = None
) -> tuple[list[np.ndarray], tuple[float, float]]:
    """log(N/unit) and log(D/unit) for the terms of the form, and the units."""
    both = (points.parameters, points.tokens)
    if units is None:
        units = (float(np.exp(np.log(both[0]).mean())), float(np.exp(np.log(both[1]).mean())))
    logs = [np.log(x / unit) for x, unit in zip(both, units, strict=True)]
    return [log for log, letter in zip(logs, "nd", strict=True) if letter in form], units


def _starts(loss: np.ndarray, axes: Sequence[np.ndarray], floor: bool) -> np.ndarray:
    """(log E, log scale, exponent, …) with the scales solved for each choice of the others."""
    starts = []
    floors = _FLOORS if floor else (0.0,)
    for share, *exponents in product(floors, *[_EXPONENTS] * len(axes)):
        height = share * loss.min()
        basis = np.exp([-p * log for log, p in zip(axes, exponents, strict=True)]).T
        scales = np.maximum(np.linalg.lstsq(basis, loss - height, rcond=None)[0], _LEAST_SCALE)
        terms = [part for pair in zip(np.log(scales), exponents, strict=True) for part in pair]
        starts.append([float(np.log(max(height, NO_FLOOR)))] * floor + [*map(float, terms)])
    return np.array(starts)


def _law(
    vector: np.ndarray, form: Form, floor: bool, units: tuple[float, float], cost: float
) -> Law:
    height = float(np.exp(vector[0])) if floor else 0.0
    rest = vector[int(floor) :]
    pairs = iter(zip(np.exp(rest[0::2]).tolist(), rest[1::2].tolist(), strict=True))
    terms = (next(pairs) if "n" in form else None, next(pairs) if "d" in form else None)
    return Law(form, height if height > NO_FLOOR else 0.0, terms, units, cost)


def _vector(law: Law, floor: bool) -> np.ndarray:
    parts = [[np.log(term[0]), term[1]] for term in law.terms if term is not None]
    flat = [value for part in parts for value in part]
    return np.array([np.log(max(law.floor, NO_FLOOR)), *flat] if floor else flat)
