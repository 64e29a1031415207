"""Figures of `leviathan inspect`: norms by frequency, and the spectrum, of several tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from leviathan.analysis.figure import DOT, ReportFigure, color, draw_figure, label_ends, note, size


def geometry_figures(models: Sequence[dict[str, Any]]) -> list[ReportFigure]:
    """Norms by training frequency (where known) and variance along principal axes.

    Args:
        models: the "models" of the result of `inspect`.
    """
    drawn = [draw_figure("spectrum", lambda narrow: _spectrum(models, narrow))]
    if all(model["geometry"]["by_frequency"] for model in models):
        drawn.append(draw_figure("norms", lambda narrow: _norms(models, narrow)))
    return drawn


def _spectrum(models: Sequence[dict[str, Any]], narrow: bool) -> Figure:
    figure = Figure(figsize=size(narrow, 3.4), layout="constrained")
    axes = figure.subplots()
    ends = []
    for number, model in enumerate(models):
        shares = np.cumsum(model["geometry"]["spectrum"])
        axes.plot(np.arange(1, len(shares) + 1), shares, color=color(number), linewidth=1.6)
        middle = float(shares[len(shares) // 2])
        ends.append((middle, f"{model['label']}", color(number)))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("principal axes in descending order")
    axes.set_ylabel("cumulative share of the variance")
    label_ends(axes, ends)
    ranks = "\n".join(
        f"{model['label']}: effective rank {model['geometry']['effective_rank']:.1f}"
        for model in models
    )
    note(axes, 0.99, 0.04, ranks, ha="right", va="bottom")
    return figure


def _norms(models: Sequence[dict[str, Any]], narrow: bool) -> Figure:
    figure = Figure(figsize=size(narrow, 3.4), layout="constrained")
    axes = figure.subplots()
    rows = models[0]["geometry"]["by_frequency"]
    names = [row["bucket"] for row in rows]
    ends = []
    for number, model in enumerate(models):
        # In units of the mean of the table, since kinds differ in scale.
        mean = model["geometry"]["norm"]["mean"] or 1.0
        spread = [row["norm"] for row in model["geometry"]["by_frequency"]]
        middle = [one["median"] / mean for one in spread]
        low, high = ([one[end] / mean for one in spread] for end in ("q05", "q95"))
        place = np.arange(len(middle))
        axes.plot(place, middle, "o-", color=color(number), linewidth=1.4, **DOT, zorder=4)
        axes.fill_between(place, low, high, color=color(number), alpha=0.15, linewidth=0)
        ends.append((middle[-1], model["label"], color(number)))
    shown = [name.replace("–", "–\n") if narrow else name for name in names]
    axes.set_xticks(range(len(names)), shown, fontsize=7 if narrow else 8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("occurrences in training")
    axes.set_ylabel("norm / mean norm of the table")
    note(axes, 0.01, 0.97, "line: median, band: 5–95 %", va="top")
    label_ends(axes, ends)
    return figure
