"""Plots as SVG text whose colours are CSS variables, so that one drawing fits light and dark pages.

Every figure is drawn twice, wide and narrow: text in an SVG that is scaled down to a telephone's
width cannot be read.
"""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Okabe and Ito's colours, told apart under every common colour blindness; the baseline is grey.
COLOURS = ("#6a737d", "#0072b2", "#d55e00", "#009e73", "#a6518b", "#b8860b", "#56a3d9")
INK, MUTED, GRID = "#1f2328", "#656d77", "#d8dee4"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    colour: f"--series-{number}" for number, colour in enumerate(COLOURS)
}
FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"

_DOT: dict[str, Any] = {"markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.7}

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


def loss_curves(curves: Sequence[dict[str, Any]], paired: bool, narrow: bool = False) -> str:
    """Training (smoothed) and validation loss of all runs over tokens; below, paired differences.

    Args:
        curves: as `compare` gives them.
        paired: also draw each run's training loss minus the first run's on the same batches.
        narrow: for a column of about 360 pixels.
    """
    lower = paired and len(curves) > 1
    with _style(f"curves{narrow}"):
        figure = Figure(figsize=_size(narrow, 5.0 if lower else 3.5), layout="constrained")
        ratios = [2.3, 1] if lower else [1]
        panels = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
        _draw_losses(panels[0, 0], curves)
        if lower:
            _draw_gaps(panels[1, 0], curves)
        panels[-1, 0].set_xlabel("training tokens")
        panels[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
        panels[-1, 0].xaxis.set_major_locator(MaxNLocator(4 if narrow else 6))
        return _svg(figure)


def frequency(strata: dict[str, Any], scale: str = "absolute", narrow: bool = False) -> str:
    """Loss by training-frequency bucket; below, the paired difference with its interval.

    Args:
        strata: the `frequency` part of `compare`, or what `leviathan frequency` returns.
        scale: `absolute` (occurrences) or `relative` (share of the training tokens).
        narrow: for a column of about 360 pixels.
    """
    kept = [i for i, row in enumerate(strata["runs"][0][scale]) if row["tokens"]]
    pairs = strata["pairs"]
    with _style(f"frequency{scale}{narrow}"):
        figure = Figure(figsize=_size(narrow, 5.2 if pairs else 3.6), layout="constrained")
        ratios = [1.7, 1] if pairs else [1]
        panels = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)
        _draw_strata(panels[0, 0], strata["runs"], scale, kept)
        if pairs:
            _draw_pairs(panels[1, 0], strata, scale, kept)
        _name_buckets(panels[-1, 0], strata["runs"][0][scale], kept, scale, narrow)
        return _svg(figure)


def save_frequency(strata: dict[str, Any], out: Path) -> list[Path]:
    """Writes `frequency_absolute.svg` and `frequency_relative.svg`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for scale in ("absolute", "relative"):
        files.append(out / f"frequency_{scale}.svg")
        files[-1].write_text(standalone(frequency(strata, scale)), encoding="utf-8")
    return files


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving mean over `width` values, over fewer at both ends."""
    half = width // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)


def smoothing_width(points: int) -> int:
    """Logged steps in one smoothed value: about a fifteenth of the curve, odd."""
    return 2 * (points // 30) + 1


def short_number(value: float) -> str:
    """1500000 → 1.5M, for axes."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def standalone(svg: str) -> str:
    """An SVG for a file of its own: namespaces back in, colours for a white page."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return re.sub(r"var\(--[a-z0-9-]+, (#\w+)\)", r"\1", svg).replace("<svg ", f"<svg {names} ", 1)


def _style(drawing: str) -> AbstractContextManager[None]:
    """Our look; ids inside the SVG are derived from the drawing's name, so that none clash."""
    settings: Any = _STYLE | {"svg.hashsalt": drawing}
    return matplotlib.rc_context(settings)


def _size(narrow: bool, height: float) -> tuple[float, float]:
    return (4.0, height * 0.92) if narrow else (8.0, height)


def _points(curve: dict[str, Any], step: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and finite losses of one curve."""
    tokens = np.asarray(curve[step], dtype=float) * curve["tokens_per_step"]
    losses = np.asarray(curve[loss], dtype=float)
    finite = np.isfinite(losses)
    return tokens[finite], losses[finite]


def _draw_losses(axes: Axes, curves: Sequence[dict[str, Any]]) -> None:
    ends = []
    for number, curve in enumerate(curves):
        colour, layer = _colour(number), 3 + number
        tokens, loss = _points(curve, "step", "train_loss")
        if not len(loss):
            continue
        width = smoothing_width(len(loss))
        if width > 1:
            axes.plot(tokens, loss, color=colour, alpha=0.25, linewidth=0.7, zorder=2)
        smooth = smoothed(loss, width)
        axes.plot(tokens, smooth, color=colour, linewidth=1.6, zorder=layer)
        held = _points(curve, "validation_step", "validation_loss")
        axes.plot(*held, "o", color=colour, **_DOT, zorder=layer + 10, clip_on=False)
        ends.append((float(smooth[-1]), curve["label"], colour))
    axes.set_xlim(0, max(curve["step"][-1] * curve["tokens_per_step"] for curve in curves))
    axes.set_ylabel("loss, nats per token")
    _label_ends(axes, ends)
    _note(axes, 0.99, 0.97, "line: training, smoothed\ndot: validation", ha="right", va="top")


def _draw_gaps(axes: Axes, curves: Sequence[dict[str, Any]]) -> None:
    """Paired on the same batches, so that the noise of the batches cancels."""
    base = dict(zip(*_points(curves[0], "step", "train_loss"), strict=True))
    axes.axhline(0, color=_colour(0), linewidth=1.2, zorder=2)
    ends = [(0.0, curves[0]["label"], _colour(0))]
    for number, curve in enumerate(curves[1:], start=1):
        points = zip(*_points(curve, "step", "train_loss"), strict=True)
        both = [(tokens, loss - base[tokens]) for tokens, loss in points if tokens in base]
        if not both:
            continue
        gap = smoothed(np.array([value for _, value in both]), smoothing_width(len(both)))
        axes.plot([at for at, _ in both], gap, color=_colour(number), linewidth=1.4, zorder=3)
        ends.append((float(gap[-1]), curve["label"], _colour(number)))
    axes.set_ylabel("difference")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _signed(y)))
    _label_ends(axes, ends)


def _draw_strata(axes: Axes, runs: Sequence[dict[str, Any]], scale: str, kept: list[int]) -> None:
    place = np.arange(len(kept))
    ends = []
    for number, run in enumerate(runs):
        loss = [run[scale][index]["nats_per_token"] for index in kept]
        axes.plot(
            place,
            loss,
            color=_colour(number),
            linewidth=1.6,
            marker="o",
            **_DOT,
            zorder=3 + number,
        )
        ends.append((loss[-1], run["label"], _colour(number)))
    axes.set_ylabel("validation loss, nats per token")
    _label_ends(axes, ends)


def _draw_pairs(axes: Axes, strata: dict[str, Any], scale: str, kept: list[int]) -> None:
    base, pairs = strata["runs"][0]["label"], strata["pairs"]
    labels = [run["label"] for run in strata["runs"]]
    axes.axhline(0, color=_colour(0), linewidth=1.2, zorder=2)
    spread = np.linspace(-0.18, 0.18, len(pairs)) if len(pairs) > 1 else np.zeros(1)
    for shift, pair in zip(spread, pairs, strict=True):
        colour = _colour(labels.index(pair["label"]))
        for place, index in enumerate(kept):
            row = pair[scale][index]
            if row["low"] is not None:
                axes.plot(
                    [place + shift] * 2, [row["low"], row["high"]], color=colour, linewidth=1.6
                )
            axes.plot(place + shift, row["difference"], "o", color=colour, **_DOT, zorder=5)
    axes.set_ylabel("difference, nats")
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _signed(y)))
    _label_ends(axes, [(0.0, base, _colour(0))])


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
    """A part of one in per cent, two digits at most."""
    if part < 1e-3:
        return "< 0.1 %"
    return f"{100 * part:.0f} %" if part >= 0.1 else f"{100 * part:.1f} %"


def _label_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right end of their lines, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height / axes.figure.dpi  # inches
    apart = (high - low) * 0.16 / max(height, 0.5)
    placed: list[float] = []
    for value, label, colour in sorted(ends):
        y = value if not placed else max(value, placed[-1] + apart)
        placed.append(y)
        axes.annotate(
            label,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def _note(axes: Axes, x: float, y: float, text: str, **where: Any) -> None:
    axes.text(
        x, y, text, transform=axes.transAxes, color=MUTED, fontsize=7.5, linespacing=1.5, **where
    )


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _signed(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:+.3g}".replace("-", "−")


def _svg(figure: Figure) -> str:
    """The drawing as an `<svg>` element for a page: no prologue, no metadata, colours by name."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would style the whole page
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg, count=4)
    svg = svg.replace("'DejaVu Sans'", FONT).replace("<svg ", '<svg stroke-linejoin="round" ', 1)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var({name}, {colour})")
    return svg.replace("#ffffff", "var(--paper, #ffffff)")
