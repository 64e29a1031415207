"""`leviathan inspect` as numbers and text: geometry of one table, or of several side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from leviathan.analysis.geometry import geometry, neighbors, similarity
from leviathan.analysis.plots_geometry import geometry_figures
from leviathan.console import as_text
from leviathan.files import check_writable_file, write_atomic


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
