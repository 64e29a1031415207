"""Plots of a comparison: loss curves with seed bands, loss by token frequency, gains, sweeps."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from leviathan.analysis.curves import smoothed, smoothing_width
from leviathan.analysis.figure import (
    DOT,
    ReportFigure,
    color,
    draw_figure,
    label_ends,
    note,
    signed,
    size,
)
from leviathan.formatting import format_count


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
    """Plots the paired differences on the same batches, in which the noise of the batches
    cancels."""
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
