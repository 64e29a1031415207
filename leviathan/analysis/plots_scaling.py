"""Losses over size or data with the fitted laws: the figure of `leviathan fit`."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from leviathan.analysis.figure import (
    DOT,
    ReportFigure,
    color,
    draw_figure,
    label_ends,
    note,
    size,
)
from leviathan.analysis.scaling import Form, Law, Points
from leviathan.formatting import format_count

Kinds = Mapping[str, tuple[Points, Law | None]]


def scaling_figure(kinds: Kinds, form: Form) -> ReportFigure:
    """Rows as dots, laws as lines; with both variables, one line per value of the other variable.

    Args:
        kinds: the rows of each kind, and its law if one was fitted; the baseline first.
        form: form of the laws.
    """
    axes_of = [letter for letter in ("n", "d") if letter in form]

    def draw(narrow: bool) -> Figure:
        stacked = narrow and len(axes_of) > 1
        figure = Figure(figsize=size(narrow, 6.4 if stacked else 3.6), layout="constrained")
        shape = (len(axes_of), 1) if stacked else (1, len(axes_of))
        panels = figure.subplots(*shape, squeeze=False).ravel()
        for panel, letter in zip(panels, axes_of, strict=True):
            _draw(panel, kinds, letter)
        return figure

    return draw_figure("fit", draw)


def _draw(axes: Axes, kinds: Kinds, letter: str) -> None:
    ends = []
    columns = [_columns(points, letter) for points, _ in kinds.values()]
    every = np.concatenate([own for own, _ in columns])
    grid = np.geomspace(every.min() / 1.15, every.max() * 1.6, 80)
    for number, (kind, (points, law)) in enumerate(kinds.items()):
        own, other = columns[number]
        axes.plot(own, points.loss, "o", color=color(number), **DOT, zorder=5)
        ends.append((float(points.loss[np.argmax(own)]), kind, color(number)))
        if law is None:
            continue
        fixed = np.unique(other) if len(law.form) > 1 else np.unique(other)[:1]
        for value in fixed[:: max(1, len(fixed) // 6)]:
            pair = (grid, value) if letter == "n" else (value, grid)
            line = law.loss(*pair)
            axes.plot(grid, line, color=color(number), linewidth=1.2, zorder=3)
        ends[-1] = (float(line[-1]), kind, color(number))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_count(x)))
    losses = np.concatenate([points.loss for points, _ in kinds.values()])
    ticks = np.round(np.geomspace(losses.min(), losses.max(), 5), 2)
    axes.set_yticks(np.unique(ticks), [f"{tick:g}" for tick in np.unique(ticks)])
    axes.set_ylabel("loss, nats per token")
    axes.set_xlabel("parameters" if letter == "n" else "training tokens")
    note(axes, 0.99, 0.97, "dot: trained\nline: fitted", ha="right", va="top")
    label_ends(axes, ends)


def _columns(points: Points, letter: str) -> tuple[np.ndarray, np.ndarray]:
    both = (points.parameters, points.tokens)
    return both if letter == "n" else (both[1], both[0])
