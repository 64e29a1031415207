"""Geometry of an embedding table in numpy: norms, effective rank, isotropy, neighbors.

Sources: effective rank after Roy and Vetterli 2007, of the variance along principal axes; isotropy
I(E) after Mu and Viswanath 2018 (arXiv 1702.01417), equation 4; linear CKA after Kornblith et al.
2019 (arXiv 1905.00414).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from scipy.stats import spearmanr

from leviathan.console import as_text
from leviathan.evaluate.frequency_buckets import BUCKETS, bucket_of
from leviathan.files import check_writable_file, write_atomic
from leviathan.report.figures import geometry_figures

# ---------------------------------------------------------------- one table

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
    """Exponential of the entropy of the variance shares: D if equal, 1 for a single axis."""
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


# ---------------------------------------------------------------- comparison of tables


class InputTable(Protocol):
    """Embedding vectors to inspect, and their origin."""

    @property
    def label(self) -> str:
        """Name of the table in tables and figures."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """Step of the checkpoint."""
        ...

    @property
    def values(self) -> np.ndarray:
        """The vectors, `[V, D]`."""
        ...

    @property
    def counts(self) -> np.ndarray | None:
        """Occurrences of every id in training, `[V]`; None if unknown."""
        ...

    def text(self, id: int) -> str:
        """A token id as readable text."""
        ...


def inspect(
    tables: Sequence[InputTable], ids: Sequence[int] = (), out: Path | None = None
) -> dict[str, Any]:
    """Geometry of every table, neighbors of `ids` in each, and similarity of two tables.

    Args:
        tables: one table, or several with the same vocabulary.
        ids: tokens whose nearest neighbors are listed.
        out: directory for `inspect.json` and the figures as SVG and PNG.

    Raises:
        DataError: `out` cannot be written.
    """
    for name in ("inspect.json", "spectrum.svg") if out else ():
        check_writable_file(out / name)  # type: ignore[operator]
    models = []
    for table in tables:
        model: dict[str, Any] = {"label": table.label, **table.identity}
        model["geometry"] = geometry(table.values, table.counts)
        model["neighbors"] = [
            {
                "id": own,
                "token": table.text(own),
                "count": int(table.counts[own]) if table.counts is not None else None,
                "nearest": [row | {"token": table.text(row["id"])} for row in rows],
            }
            for own, rows in zip(ids, neighbors(table.values, ids), strict=True)
        ]
        models.append(model)
    result: dict[str, Any] = {"models": models, "similarity": None}
    if len(tables) == 2 and len(tables[0].values) == len(tables[1].values):
        result["similarity"] = similarity(tables[0].values, tables[1].values)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        figures = geometry_figures(models)
        result["files"] = [str(file) for one in figures for file in one.save(out)]
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(out / "inspect.json", text.encode())
    return result


_ROWS = (
    ("ids", lambda g: f"{g['ids']:,}"),
    ("width D", lambda g: f"{g['width']:,}"),
    ("std of the values", lambda g: f"{g['std']:.4g}"),
    ("norm, mean ± std", lambda g: f"{g['norm']['mean']:.4g} ± {g['norm']['std']:.2g}"),
    ("norm and frequency, rank correlation", lambda g: _optional(g["rank_correlation"])),
    ("effective rank", lambda g: f"{g['effective_rank']:.1f} of {g['width']}"),
    ("axes for 90 % of the variance", lambda g: f"{g['axes_for_90_percent']}"),
    ("mean cosine of two tokens", lambda g: f"{g['mean_cosine']:+.3f}"),
    ("share of the common mean", lambda g: f"{100 * g['mean_share']:.1f} %"),
    ("isotropy (1 = isotropic)", lambda g: f"{g['isotropy']:.3f}"),
    ("distinct rows", lambda g: f"{g['distinct']:,}"),
)


def inspect_text(result: dict[str, Any]) -> str:
    """The result as text."""
    models = result["models"]
    table = Table(title="Input table", title_justify="left")
    table.add_column("")
    for model in models:
        table.add_column(model["label"], justify="right")
    for name, value in _ROWS:
        table.add_row(name, *(value(model["geometry"]) for model in models))
    if result["similarity"] is not None:
        table.caption = f"similarity of the two (linear CKA): {result['similarity']:.3f}"
    tables: list[RenderableType] = [table]
    if models[0]["geometry"]["by_frequency"]:
        tables.append(_frequency_table(models))
    for index in range(len(models[0]["neighbors"])):
        tables += _neighbors_of(models, index)
    return as_text(*tables)


def _frequency_table(models: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Norm (median) and mean cosine by occurrences", title_justify="left")
    table.add_column("occurrences")
    table.add_column("ids", justify="right")
    for model in models:
        table.add_column(f"{model['label']}, norm", justify="right")
        table.add_column("cosine", justify="right")
    for index, row in enumerate(models[0]["geometry"]["by_frequency"]):
        cells = []
        for model in models:
            own = model["geometry"]["by_frequency"][index]
            cells += [f"{own['norm']['median']:.3g}", f"{own['mean_cosine']:+.3f}"]
        table.add_row(row["bucket"], f"{row['ids']:,}", *cells)
    return table


def _neighbors_of(models: Sequence[dict[str, Any]], index: int) -> list[RenderableType]:
    """A line that names the token, and the table of its neighbors."""
    token = models[0]["neighbors"][index]
    seen = f", {token['count']:,} times in training" if token["count"] is not None else ""
    title = f"Nearest to {token['token']!r} (id {token['id']}{seen})"
    table = Table()
    for model in models:
        table.add_column(model["label"])
        table.add_column("cosine", justify="right")
    columns = [model["neighbors"][index]["nearest"] for model in models]
    for rows in zip(*columns, strict=True):
        cells = [part for row in rows for part in (repr(row["token"]), f"{row['cosine']:+.3f}")]
        table.add_row(*cells)
    # A title of the table would be wrapped at the width of the table.
    return [Text(title, style="italic"), table]


def _optional(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"
