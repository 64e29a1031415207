"""Geometry of an embedding table in numpy: norms, effective rank, isotropy, neighbors.

Sources: effective rank after Roy and Vetterli 2007, of the variance along principal axes; isotropy
I(E) after Mu and Viswanath 2018 (arXiv 1702.01417), equation 4; linear CKA after Kornblith et al.
2019 (arXiv 1905.00414).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from leviathan.evaluate.frequency_buckets import BUCKETS, bucket_of

QUANTILES = (0.05, 0.5, 0.95)


def geometry(table: np.ndarray, counts: np.ndarray | None = None) -> dict[str, Any]:
    """Computes the geometry of an embedding table.

    Args:
        table: one vector per token id, `[V, D]` float.
        counts: occurrences of every id in training, `[V]`; without them, `by_frequency` and
            `rank_correlation` are omitted.

    Returns:
        `norm` (mean, std, quantiles), `by_frequency` (vectors by bucket), `rank_correlation` of
        norm and count, `spectrum` (variance shares along principal axes, descending),
        `effective_rank`, `axes_for_90_percent`, `mean_cosine` of two tokens, `mean_share` (share of
        the mean square due to the common mean), `isotropy`, and the number of `distinct` vectors.
    """
    table = np.asarray(table, dtype=np.float64)
    norms = np.linalg.norm(table, axis=1)
    center = table.mean(axis=0)
    shares = _variance_shares(table - center)
    square = float((norms**2).mean())
    found: dict[str, Any] = {
        "ids": len(table),
        "width": table.shape[1],
        "norm": _spread(norms),
        "std": float(table.std()),
        "spectrum": shares.tolist(),
        "effective_rank": effective_rank(shares),
        "axes_for_90_percent": int(np.searchsorted(np.cumsum(shares), 0.9) + 1),
        "mean_cosine": mean_cosine(table),
        "mean_share": float(center @ center) / square if square else 0.0,
        "isotropy": isotropy(table),
        "distinct": len(np.unique(table.round(12), axis=0)),
        "by_frequency": None,
        "rank_correlation": None,
    }
    if counts is not None:
        found["by_frequency"] = _by_frequency(table, norms, counts)
        seen = counts > 0
        if seen.sum() > 2 and np.ptp(norms[seen]) > 0:
            found["rank_correlation"] = float(spearmanr(norms[seen], counts[seen])[0])
    return found


def effective_rank(shares: np.ndarray) -> float:
    """Exponential of the entropy of the variance shares: D if all are equal, 1 if one axis has
    all."""
    kept = shares[shares > 0]
    return float(np.exp(-(kept * np.log(kept)).sum())) if len(kept) else 0.0


def mean_cosine(table: np.ndarray) -> float:
    """Mean cosine of two different vectors, exact over all pairs; 0 for vectors of zero norm."""
    units = _units(table)
    count = len(table)
    total = units.sum(axis=0)
    own = float((units**2).sum())
    return (float(total @ total) - own) / (count * (count - 1)) if count > 1 else 0.0


def isotropy(table: np.ndarray) -> float:
    """Minimum over maximum of Σ exp(±c·e) over the principal axes c; 1 for an isotropic table.

    Vectors are first scaled to a mean norm of 1, so that tables of different scale are comparable.
    """
    scale = float(np.linalg.norm(table, axis=1).mean())
    if not scale:
        return 1.0
    table = table / scale
    _, axes = np.linalg.eigh(table.T @ table)
    along = table @ axes
    sums = np.concatenate([np.exp(along).sum(axis=0), np.exp(-along).sum(axis=0)])
    return float(sums.min() / sums.max())


def neighbors(table: np.ndarray, ids: Sequence[int], count: int = 8) -> list[list[dict[str, Any]]]:
    """The nearest vectors to each of `ids` by cosine, best first, without the id itself."""
    units = _units(np.asarray(table, dtype=np.float64))
    found = []
    for own in ids:
        cosines = units @ units[own]
        cosines[own] = -np.inf
        best = np.argsort(-cosines, kind="stable")[:count]
        found.append([{"id": int(i), "cosine": float(cosines[i])} for i in best])
    return found


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Linear CKA of two tables with the same ids: 1 if they are equal up to rotation and scale."""
    one, other = (np.asarray(x, dtype=np.float64) - x.mean(axis=0) for x in (one, other))
    norms = np.linalg.norm(one.T @ one) * np.linalg.norm(other.T @ other)
    return float(np.linalg.norm(one.T @ other) ** 2 / norms) if norms else 0.0


def _units(table: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(table, axis=1, keepdims=True)
    return np.divide(table, norms, out=np.zeros_like(table), where=norms > 0)


def _variance_shares(centered: np.ndarray) -> np.ndarray:
    values = np.linalg.eigvalsh(centered.T @ centered)[::-1].clip(min=0)
    total = values.sum()
    return values / total if total else values


def _spread(norms: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(norms, QUANTILES).tolist()
    spread = {"mean": float(norms.mean()), "std": float(norms.std())}
    return spread | {"q05": low, "median": middle, "q95": high}


def _by_frequency(table: np.ndarray, norms: np.ndarray, counts: np.ndarray) -> list[dict[str, Any]]:
    """Norms and mean cosine of the ids in each bucket of training occurrences."""
    bucket = bucket_of(counts, "absolute")
    rows = []
    for index, described in enumerate(BUCKETS["absolute"]):
        inside = bucket == index
        if not inside.any():
            continue
        row = {"bucket": described.label, "ids": int(inside.sum()), "norm": _spread(norms[inside])}
        rows.append(row | {"mean_cosine": mean_cosine(table[inside])})
    return rows
