"""Scaling laws: L = E + A·N^-α + B·D^-β by robust regression, with bootstrap intervals.

N is parameters, D training tokens, L nats per token, E the floor that neither removes. Where a
table varies only one of them, or both along one line, only one power law can be told from it.

Source: Hoffmann et al. 2022 (arXiv 2203.15556), approach 3: Huber's loss on log L, many starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np
from scipy.optimize import least_squares, lsq_linear
from scipy.special import logsumexp

Form = Literal["n", "d", "nd"]
FORMS: dict[Form, str] = {
    "n": "L = E + A·N^-α",
    "d": "L = E + B·D^-β",
    "nd": "L = E + A·N^-α + B·D^-β",
}
HUBER_DELTA = 1e-3  # of log L, as in the source: larger residuals count by their size, not square
CONFIDENCE = 0.95
REPLICATES = 400
_POLISHED = 12  # of all starts, those whose cost is least
_EXPONENTS = (0.15, 0.3, 0.5, 0.9)
_FLOORS = (0.0, 0.3, 0.6, 0.8, 0.95)  # of the least loss
_EXPONENT_BOUNDS = (0.01, 4.0)
_NO_FLOOR = 1e-4  # nats; a floor this low is none


@dataclass(frozen=True)
class Points:
    """Rows of a table: parameters [R], tokens [R], loss [R], and the loss's rounding [R] (±)."""

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
    """A fitted law. `terms` are (scale, exponent) of N and D; None where the form has no such one.

    A scale is the loss that the term contributes at `unit`, the rows' geometric mean of N or D: A
    and B of the formula are of astronomic size and say nothing by themselves.
    """

    form: Form
    floor: float
    terms: tuple[tuple[float, float] | None, tuple[float, float] | None]
    units: tuple[float, float]
    cost: float

    def loss(self, parameters: Any, tokens: Any) -> np.ndarray:
        """L at N and D, nats."""
        total = np.asarray(self.floor, dtype=float)
        for value, term, unit in zip((parameters, tokens), self.terms, self.units, strict=True):
            if term is not None:
                total = total + term[0] * (np.asarray(value, dtype=float) / unit) ** -term[1]
        return total

    def reaching(self, axis: Literal["n", "d"], loss: float, other: float) -> float | None:
        """The N (or D) at which the law gives `loss`, the other one being `other`.

        None where it is never reached: the loss lies below the floor and the other term.
        """
        index = 0 if axis == "n" else 1
        term = self.terms[index]
        assert term is not None, f"{self.form} has no term of {axis}"
        rest, left = self.terms[1 - index], loss - self.floor
        if rest is not None:
            left -= rest[0] * (other / self.units[1 - index]) ** -rest[1]
        return float(self.units[index] * (left / term[0]) ** (-1 / term[1])) if left > 0 else None

    def named(self) -> dict[str, float]:
        """E, α, β and the coefficients A, B, whichever the form has."""
        values = {"E": self.floor}
        pairs = (("A", "alpha"), ("B", "beta"))
        for names, term, unit in zip(pairs, self.terms, self.units, strict=True):
            if term is not None:
                values[names[0]] = float(term[0] * unit ** term[1])
                values[names[1]] = term[1]
        return values


def free_parameters(form: Form, floor: bool = True) -> int:
    """How many numbers a form is free in."""
    return 2 * len(form) + floor


def fit(points: Points, form: Form, floor: bool = True) -> Law:
    """The law with the least Huber cost over many starts.

    Args:
        points: at least as many rows as the form is free in.
        form: which terms.
        floor: False fixes E = 0, a plain power law.
    """
    units = tuple(float(np.exp(np.log(x).mean())) for x in (points.parameters, points.tokens))
    starts = sorted((_cost(start, points, form, units), start) for start in _starts(points, form))
    found = [
        _polish(np.array(start), points, form, floor, units) for _, start in starts[:_POLISHED]
    ]
    return min(found, key=lambda law: law.cost)


def bootstrap(
    points: Points, law: Law, floor: bool = True, replicates: int = REPLICATES, seed: int = 0
) -> list[Law]:
    """Laws fitted to losses drawn around `law`: its residuals, resampled, and the rounding.

    With as many rows as free numbers there are no residuals: then only the rounding is covered.
    """
    random = np.random.default_rng(seed)
    expected = law.loss(points.parameters, points.tokens)
    residuals = np.log(points.loss) - np.log(expected)
    spare = len(points) - free_parameters(law.form, floor)
    # A robust fit goes through about as many rows as it is free in: their residuals are no noise.
    order = np.argsort(np.abs(residuals))
    noise = residuals[order[-spare:]] if spare > 0 else np.zeros(1)
    noise = noise * np.sqrt(len(points) / max(1, spare))
    laws = []
    for _ in range(replicates):
        drawn = expected * np.exp(random.choice(noise, len(points)))
        drawn = drawn + random.uniform(-1, 1, len(points)) * points.rounding
        start = _vector(law, floor)
        laws.append(_polish(start, points.with_loss(drawn), law.form, floor, law.units))
    return laws


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
    """γ if D = c·N^γ over all rows (within 15 %): then N and D cannot be told apart; else None."""
    n, d = np.log(points.parameters), np.log(points.tokens)
    if np.ptp(n) < 1e-9 or np.ptp(d) < 1e-9:
        return None
    slope, intercept = np.polyfit(n, d, 1)
    return float(slope) if np.abs(d - slope * n - intercept).max() < 0.15 else None


def _starts(points: Points, form: Form) -> list[tuple[float, ...]]:
    """(log E, log scale, exponent, …) with the scales solved for each choice of the rest."""
    axes = [x for x, letter in ((points.parameters, "n"), (points.tokens, "d")) if letter in form]
    axes = [x / np.exp(np.log(x).mean()) for x in axes]
    starts = []
    for floor, *exponents in product(_FLOORS, *[_EXPONENTS] * len(axes)):
        height = floor * points.loss.min()
        basis = np.stack([x**-p for x, p in zip(axes, exponents, strict=True)], axis=1)
        scales = lsq_linear(basis, points.loss - height, bounds=(1e-6, np.inf)).x
        terms = [part for pair in zip(np.log(scales), exponents, strict=True) for part in pair]
        starts.append((float(np.log(max(height, _NO_FLOOR))), *map(float, terms)))
    return starts


def _predict(
    vector: np.ndarray, points: Points, form: Form, units: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """log L, each part's logarithm [parts, R], and log(N/unit), log(D/unit) of the form's axes."""
    logs = [
        np.log(x / unit)
        for x, unit, letter in zip((points.parameters, points.tokens), units, "nd", strict=True)
        if letter in form
    ]
    parts = [np.full(len(points), vector[0])]
    parts += [vector[1 + 2 * i] - vector[2 + 2 * i] * log for i, log in enumerate(logs)]
    stacked = np.stack(parts)
    return np.asarray(logsumexp(stacked, axis=0)), stacked, logs


def _cost(start: Sequence[float], points: Points, form: Form, units: Sequence[float]) -> float:
    predicted, _, _ = _predict(np.array(start), points, form, units)
    return float(np.abs(predicted - np.log(points.loss)).sum())


def _polish(
    start: np.ndarray, points: Points, form: Form, floor: bool, units: Sequence[float]
) -> Law:
    """The local optimum from a start; without a floor its logarithm is held far below."""
    held = np.log(_NO_FLOOR) - 10
    target = np.log(points.loss)
    low = np.array([np.log(_NO_FLOOR) - 1, *[-20, _EXPONENT_BOUNDS[0]] * len(form)])
    high = np.array([target.min() - 1e-9, *[20, _EXPONENT_BOUNDS[1]] * len(form)])

    def whole(vector: np.ndarray) -> np.ndarray:
        return vector if floor else np.concatenate([[held], vector])

    def residuals(vector: np.ndarray) -> np.ndarray:
        return _predict(whole(vector), points, form, units)[0] - target

    def jacobian(vector: np.ndarray) -> np.ndarray:
        predicted, parts, logs = _predict(whole(vector), points, form, units)
        weight = np.exp(parts - predicted)
        columns = [weight[0]]
        for index, log in enumerate(logs, start=1):
            columns += [weight[index], -weight[index] * log]
        return np.stack(columns, axis=1)[:, 0 if floor else 1 :]

    if not floor:
        start, low, high = start[-2 * len(form) :], low[1:], high[1:]
    found = least_squares(
        residuals,
        np.clip(start, low + 1e-9, high - 1e-9),
        jac=jacobian,  # type: ignore[arg-type]  # a function is taken too
        bounds=(low, high),
        loss="huber",
        f_scale=HUBER_DELTA,
        max_nfev=300,
    )
    vector = whole(found.x)
    pairs = iter(zip(np.exp(vector[1::2]).tolist(), vector[2::2].tolist(), strict=True))
    terms = (next(pairs) if "n" in form else None, next(pairs) if "d" in form else None)
    height = float(np.exp(vector[0]))
    return Law(
        form,
        height if height > _NO_FLOOR else 0.0,
        terms,
        (units[0], units[1]),
        float(found.cost),
    )


def _vector(law: Law, floor: bool) -> np.ndarray:
    parts = [[np.log(term[0]), term[1]] for term in law.terms if term is not None]
    flat = [value for part in parts for value in part]
    return np.array([np.log(max(law.floor, _NO_FLOOR)), *flat] if floor else [0.0, *flat])
