"""Batched Huber regression of log L = log(E + Σ s·x^-p) on many sets of losses.

A set is a starting point or a bootstrap replicate. Hundreds of sets are fitted together as arrays.
"""

from collections.abc import Sequence

import numpy as np

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
