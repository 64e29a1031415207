"""A figure as SVG with CSS colors for a page, as a standalone SVG file and as PNG.

Every figure of a page is drawn twice, wide and narrow: text in an SVG that is scaled to the width
of a phone is not legible.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from leviathan.files import write_atomic
from leviathan.formatting import format_count
from leviathan.report.curves import smoothed, smoothing_width
from leviathan.report.scaling_law import Form, Law, Points

# ---------------------------------------------------------------- figures

# Okabe and Ito's palette, distinguishable with color blindness; the baseline is gray
COLORS = ("#6a737d", "#0072b2", "#d55e00", "#009e73", "#a6518b", "#b8860b", "#56a3d9", "#7d5a3c")
INK, MUTED, GRID = "#1f2328", "#656d77", "#d8dee4"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    color: f"--series-{number}" for number, color in enumerate(COLORS)
}
FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
DOT: dict[str, Any] = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.7}
PNG_DPI = 160

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "savefig.transparent": True,
}


@dataclass(frozen=True)
class ReportFigure:
    """One figure in every form.

    Attributes:
        name: file name without suffix.
        wide, narrow: `<svg>` elements for a page, colors by CSS variable.
        svg: standalone SVG for a white background.
        png: the same as PNG.
    """

    name: str
    wide: str
    narrow: str
    svg: str
    png: bytes

    def save(self, folder: Path) -> list[Path]:
        """Writes `NAME.svg` and `NAME.png`; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{self.name}.svg", folder / f"{self.name}.png"]
        write_atomic(files[0], self.svg.encode())
        write_atomic(files[1], self.png)
        return files


def draw_figure(name: str, draw: Callable[[bool], Figure]) -> ReportFigure:
    """Draws twice; `draw(narrow)` returns a figure 8 inches wide, or 4 inches if `narrow`."""
    forms = []
    png = b""
    for narrow in (False, True):
        # Ids in the SVG are derived from the name of the figure and therefore unique on a page.
        settings: Any = _STYLE | {"svg.hashsalt": f"{name}{narrow}"}
        with matplotlib.rc_context(settings):
            figure = draw(narrow)
            forms.append(_svg(figure))
            if not narrow:
                buffer = io.BytesIO()
                figure.savefig(
                    buffer, format="png", dpi=PNG_DPI, facecolor="white", transparent=False
                )
                png = buffer.getvalue()
    return ReportFigure(name, forms[0], forms[1], standalone(forms[0]), png)


def size(narrow: bool, height: float) -> tuple[float, float]:
    """Height in inches of a figure whose wide form is `height` inches high."""
    return (4.0, height * 0.92) if narrow else (8.0, height)


def standalone(svg: str) -> str:
    """A standalone SVG: with namespaces, and colors for a white background."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return re.sub(r"var\(--[a-z0-9-]+, (#\w+)\)", r"\1", svg).replace("<svg ", f"<svg {names} ", 1)


def color(number: int) -> str:
    """Color of the series with this index; index 0 is the baseline."""
    return COLORS[number % len(COLORS)]


def signed(value: float) -> str:
    """Formats an axis tick with its sign: `+0.1` or `−0.1`."""
    return "0" if abs(value) < 1e-9 else f"{value:+.3g}".replace("-", "−")


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Labels lines (value, name, color) at their right end, without overlaps."""
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height / axes.figure.dpi  # inches
    spacing = (high - low) * 0.16 / max(height, 0.5)
    placed: list[float] = []
    for value, label, shade in sorted(ends):
        y = value if not placed else max(value, placed[-1] + spacing)
        placed.append(y)
        axes.annotate(
            label,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            color=shade,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def note(axes: Axes, x: float, y: float, text: str, **where: Any) -> None:
    """Writes a note inside the axes; the position is in axes coordinates."""
    axes.text(
        x, y, text, transform=axes.transAxes, color=MUTED, fontsize=7.5, linespacing=1.5, **where
    )


def _svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for a page: no prologue or metadata, colors by name."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would style the page
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg, count=4)
    svg = svg.replace("'DejaVu Sans'", FONT).replace("<svg ", '<svg stroke-linejoin="round" ', 1)
    for shade, name in VARIABLES.items():
        svg = svg.replace(shade, f"var({name}, {shade})")
    return svg.replace("#ffffff", "var(--paper, #ffffff)")


# ---------------------------------------------------------------- comparison


def loss_curves(curves: Sequence[dict[str, Any]], name: str = "curves") -> ReportFigure:
    """Training (smoothed) and validation loss of all arms over tokens; below, paired differences.

    Lines are means over seeds; bands span the minimum and maximum over seeds.

    Args:
        curves: from `compare`, the baseline first.
        name: name of the figure.
    """
    lower = any(curve["difference"] for curve in curves)

    def draw(narrow: bool) -> Figure:
        figure = Figure(figsize=size(narrow, 5.0 if lower else 3.5), layout="constrained")
        ratios = [2.3, 1] if lower else [1]
        panels = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
        _draw_losses(panels[0, 0], curves)
        if lower:
            _draw_gaps(panels[1, 0], curves)
        panels[-1, 0].set_xlabel("training tokens")
        panels[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_count(x)))
        panels[-1, 0].xaxis.set_major_locator(MaxNLocator(4 if narrow else 6))
        return figure

    return draw_figure(name, draw)


def frequency(
    buckets: dict[str, Any], scale: str = "absolute", name: str | None = None
) -> ReportFigure:
    """Loss by training-frequency bucket; below, the paired difference with its interval.

    Args:
        buckets: the `frequency` part of `compare`, or the result of `leviathan frequency`.
        scale: `absolute` (occurrences) or `relative` (share of the training tokens).
        name: name of the figure.
    """
    kept = [i for i, row in enumerate(buckets["runs"][0][scale]) if row["tokens"]]
    pairs = buckets["pairs"]

    def draw(narrow: bool) -> Figure:
        figure = Figure(figsize=size(narrow, 5.2 if pairs else 3.6), layout="constrained")
        ratios = [1.7, 1] if pairs else [1]
        panels = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
        _draw_buckets(panels[0, 0], buckets["runs"], scale, kept)
        if pairs:
            _draw_pairs(panels[1, 0], buckets, scale, kept)
        _name_buckets(panels[-1, 0], buckets["runs"][0][scale], kept, scale, narrow)
        return figure

    return draw_figure(name or f"frequency_{scale}", draw)


def sweep(swept: dict[str, Any], name: str = "sweep") -> ReportFigure:
    """Final validation loss over the first swept key: one line per arm, a ring at the chosen value.

    Args:
        swept: the `sweep` part of a group.
        name: name of the figure.
    """
    key = swept["keys"][0]
    values = list(dict.fromkeys(p["values"][key] for a in swept["arms"] for p in a["points"]))
    numeric = all(isinstance(v, int | float) and v > 0 for v in values)
    place = {value: value if numeric else number for number, value in enumerate(values)}

    def draw(narrow: bool) -> Figure:
        figure = Figure(figsize=size(narrow, 3.6), layout="constrained")
        axes = figure.subplots()
        ends = []
        for number, arm in enumerate(swept["arms"]):
            known = [point for point in arm["points"] if point["loss"] is not None]
            if not known:
                continue
            x = [place[point["values"][key]] for point in known]
            loss = [point["loss"] for point in known]
            style = "o" if len(swept["keys"]) > 1 else "o-"
            axes.plot(x, loss, style, color=color(number), linewidth=1.4, **DOT, zorder=4)
            for at, point in zip(x, known, strict=True):
                axes.plot([at, at], [point["low"], point["high"]], color=color(number), zorder=3)
            best = None if arm["best"] is None else arm["points"][arm["best"]]
            if best is not None and best["loss"] is not None:
                at, ring = place[best["values"][key]], {"markersize": 11, "fillstyle": "none"}
                axes.plot(at, best["loss"], "o", color=color(number), zorder=5, **ring)
            ends.append((loss[-1], arm["label"], color(number)))
        if numeric and len(values) > 1:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(list(place.values()), [_tick(value) for value in values])
        axes.minorticks_off()
        axes.set_xlabel(key)
        axes.set_ylabel("validation loss, nats per token")
        note(axes, 0.01, 0.97, "ring: lowest training loss of the arm", va="top")
        label_ends(axes, ends)
        return figure

    return draw_figure(name, draw)


def gains(groups: Sequence[dict[str, Any]]) -> ReportFigure:
    """Perplexity change to the baseline per group, with the interval over seeds."""
    labels = list(dict.fromkeys(arm["label"] for g in groups for arm in g["arms"][1:]))

    def draw(narrow: bool) -> Figure:
        figure = Figure(figsize=size(narrow, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.axhline(0, color=color(0), linewidth=1.2, zorder=2)
        spread = np.linspace(-0.12, 0.12, len(labels)) if len(labels) > 1 else np.zeros(1)
        ends = []
        for number, label in enumerate(labels, start=1):
            last = None
            for at, group in enumerate(groups):
                relative = _relative_of(group, label)
                if relative is None:
                    continue
                x, seeds = at + spread[number - 1], relative["seeds"]
                if seeds["low"] is not None:
                    reach = [100 * np.expm1(seeds[end]) for end in ("low", "high")]
                    axes.plot([x, x], reach, color=color(number), linewidth=1.6)
                last = relative["perplexity_percent"]
                axes.plot(x, last, "o", color=color(number), **DOT, zorder=5)
            if last is not None:
                ends.append((last, label, color(number)))
        axes.set_xticks(range(len(groups)), [group["name"] for group in groups])
        axes.set_xlim(-0.4, len(groups) - 0.6)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{signed(y)} %"))
        axes.set_ylabel("perplexity, change to baseline")
        label_ends(axes, ends)
        return figure

    return draw_figure("gains", draw)


def _relative_of(group: dict[str, Any], label: str) -> dict[str, Any] | None:
    for arm in group["arms"][1:]:
        if arm["label"] == label and (arm["relative"] or {}).get("perplexity_percent") is not None:
            return arm["relative"]
    return None


def _tick(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def save_frequency(buckets: dict[str, Any], out: Path) -> list[Path]:
    """Writes `frequency_absolute` and `frequency_relative` as SVG and PNG; returns their paths."""
    return [
        file for scale in ("absolute", "relative") for file in frequency(buckets, scale).save(out)
    ]


def _draw_losses(axes: Axes, curves: Sequence[dict[str, Any]]) -> None:
    ends = []
    for number, curve in enumerate(curves):
        shade, layer = color(number), 3 + number
        train, held = curve["train"], curve["validation"]
        if not train["at"]:
            continue
        tokens, loss = np.array(train["at"]), np.array(train["mean"])
        width = smoothing_width(len(loss))
        if width > 1 and curve["seeds"] == 1:
            axes.plot(tokens, loss, color=shade, alpha=0.25, linewidth=0.7, zorder=2)
        smooth = smoothed(loss, width)
        axes.plot(tokens, smooth, color=shade, linewidth=1.6, zorder=layer)
        if curve["seeds"] > 1:
            low, high = (smoothed(np.array(train[end]), width) for end in ("low", "high"))
            axes.fill_between(tokens, low, high, color=shade, alpha=0.18, linewidth=0, zorder=2)
        axes.plot(
            held["at"], held["mean"], "o", color=shade, **DOT, zorder=layer + 10, clip_on=False
        )
        ends.append((float(smooth[-1]), curve["label"], shade))
    axes.set_xlim(0, max(curve["train"]["at"][-1] for curve in curves if curve["train"]["at"]))
    axes.set_ylabel("loss, nats per token")
    label_ends(axes, ends)
    note(axes, 0.99, 0.97, "line: training, smoothed\ndot: validation", ha="right", va="top")


def _draw_gaps(axes: Axes, curves: Sequence[dict[str, Any]]) -> None:
    """Plots the paired differences, in which the noise of the batches cancels."""
    axes.axhline(0, color=color(0), linewidth=1.2, zorder=2)
    ends = [(0.0, curves[0]["label"], color(0))]
    for number, curve in enumerate(curves):
        gap = curve["difference"]
        if not gap or not gap["at"]:
            continue
        width = smoothing_width(len(gap["at"]))
        mean = smoothed(np.array(gap["mean"]), width)
        axes.plot(gap["at"], mean, color=color(number), linewidth=1.4, zorder=3)
        if curve["seeds"] > 1:
            low, high = (smoothed(np.array(gap[end]), width) for end in ("low", "high"))
            axes.fill_between(gap["at"], low, high, color=color(number), alpha=0.18, linewidth=0)
        ends.append((float(mean[-1]), curve["label"], color(number)))
    axes.set_ylabel("difference")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: signed(y)))
    label_ends(axes, ends)


def _draw_buckets(axes: Axes, runs: Sequence[dict[str, Any]], scale: str, kept: list[int]) -> None:
    place = np.arange(len(kept))
    ends = []
    for number, run in enumerate(runs):
        loss = [run[scale][index]["nats_per_token"] for index in kept]
        axes.plot(
            place,
            loss,
            color=color(number),
            linewidth=1.6,
            marker="o",
            **DOT,
            zorder=3 + number,
        )
        ends.append((loss[-1], run["label"], color(number)))
    axes.set_ylabel("validation loss, nats per token")
    label_ends(axes, ends)


def _draw_pairs(axes: Axes, buckets: dict[str, Any], scale: str, kept: list[int]) -> None:
    base, pairs = buckets["runs"][0]["label"], buckets["pairs"]
    labels = [run["label"] for run in buckets["runs"]]
    axes.axhline(0, color=color(0), linewidth=1.2, zorder=2)
    spread = np.linspace(-0.18, 0.18, len(pairs)) if len(pairs) > 1 else np.zeros(1)
    for shift, pair in zip(spread, pairs, strict=True):
        shade = color(labels.index(pair["label"]))
        for place, index in enumerate(kept):
            row = pair[scale][index]
            if row["low"] is not None:
                axes.plot(
                    [place + shift] * 2, [row["low"], row["high"]], color=shade, linewidth=1.6
                )
            axes.plot(place + shift, row["difference"], "o", color=shade, **DOT, zorder=5)
    axes.set_ylabel("difference, nats")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: signed(y)))
    label_ends(axes, [(0.0, base, color(0))])


def _name_buckets(
    axes: Axes, rows: Sequence[dict[str, Any]], kept: list[int], scale: str, narrow: bool
) -> None:
    total = sum(row["tokens"] for row in rows)
    names = []
    for index in kept:
        name = rows[index]["bucket"]
        if narrow or scale == "relative":
            name = name.replace(" – ", "–\n")
        if narrow:
            name = re.sub(r"(?<=\w)–(?=\w)", "–\n", name).replace("1 in ", "1 in\n")
        names.append(f"{name}\n{share(rows[index]['tokens'] / total)}")
    axes.set_xticks(range(len(kept)), names, fontsize=7 if narrow else 8, linespacing=1.4)
    axes.set_xlim(-0.4, len(kept) - 0.6)
    what = "occurrences in training" if scale == "absolute" else "frequency in training"
    axes.set_xlabel(
        f"{what}; %: share of targets"
        if narrow
        else f"{what}; %: the bucket's share of all targets"
    )


def share(part: float) -> str:
    """A fraction in percent, with at most two digits."""
    if part < 1e-3:
        return "< 0.1 %"
    return f"{100 * part:.0f} %" if part >= 0.1 else f"{100 * part:.1f} %"


# ---------------------------------------------------------------- geometry


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


# ---------------------------------------------------------------- scaling laws

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
