"""The report as one HTML page without scripts or external resources; light, dark and in print."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from leviathan.analysis import plots
from leviathan.analysis.figure import ReportFigure
from leviathan.analysis.html import (
    caption,
    document,
    figure,
    row,
    section,
    table,
    with_change,
)
from leviathan.analysis.page_parts import by_frequency, downstream, fairness, swept, what_differs
from leviathan.analysis.summary import SMALL_RUN_TOKENS
from leviathan.analysis.table import (
    ComparisonRow,
    arm_title,
    comparison_rows,
    load_note,
    number,
    signed,
    speed_note,
    within_note,
)
from leviathan.evaluate.intervals import MIN_SAMPLED, MIN_SPARE, comparisons_note

ReportFigures = Mapping[str, ReportFigure]
COLUMNS = 4  # maximum number of arms side by side on a page, in print, too


def report_page(report: dict[str, Any], figures: ReportFigures) -> str:
    """The complete HTML document.

    Args:
        report: the result of `compare`.
        figures: figures by name, from `draw_figures`.
    """
    groups = report["groups"]
    parts = [_header(report), _overview(groups, figures)]
    for index, group in enumerate(groups):
        if group["name"]:
            parts.append(f'<h2 class="group">{escape(group["name"])}</h2>')
        parts += _group(group, index, figures)
    parts.append(_guide(report))
    return document(report["title"], "".join(parts))


def draw_figures(report: dict[str, Any]) -> dict[str, ReportFigure]:
    """All figures of a report by name."""
    drawn = [plots.gains(report["groups"])] if len(report["groups"]) > 1 else []
    for index, group in enumerate(report["groups"]):
        drawn.append(plots.loss_curves(group["curves"], figure_name(group, index, "curves")))
        if group["sweep"]:
            drawn.append(plots.sweep(group["sweep"], figure_name(group, index, "sweep")))
        if group["frequency"]:
            drawn += [
                plots.frequency(group["frequency"], s, figure_name(group, index, f"frequency_{s}"))
                for s in ("absolute", "relative")
            ]
    return {one.name: one for one in drawn}


def figure_name(group: dict[str, Any], index: int, what: str) -> str:
    """Name and file name of a figure: plain characters, unique over the groups."""
    if not group["name"]:
        return what
    plain = "".join(c if c.isalnum() and c.isascii() else "_" for c in group["name"])
    return f"{index + 1}_{plain}_{what}"


def _group(group: dict[str, Any], index: int, figures: ReportFigures) -> list[str]:
    def drawn(what: str) -> ReportFigure | None:
        return figures.get(figure_name(group, index, what))

    curves = drawn("curves")
    assert curves is not None
    return [
        section(*swept(group, drawn("sweep"))),
        _comparison(group),
        section("Loss during training", figure(curves, "Loss curves", _curve_caption(group))),
        section("Loss by training frequency", by_frequency(group, drawn("frequency_absolute"))),
        section("Downstream tasks", downstream(group)),
        section("Validation loss by subset", _subsets(group)),
        section("Seeds, one by one", _seeds(group)),
        section("Is the comparison fair?", fairness(group)),
        section("Configuration differences", what_differs(group)),
    ]


def _header(report: dict[str, Any]) -> str:
    question = f'<p class="question">{escape(report["question"])}</p>' if report["question"] else ""
    missing = report["missing"]
    gone = (
        caption(f"{len(missing)} runs have not started: {escape(', '.join(missing))}.")
        if missing
        else ""
    )
    return (
        f'<header><p class="eyebrow">Leviathan · comparison of runs</p>'
        f"<h1>{escape(report['title'])}</h1>{question}"
        f'<p class="summary">{escape(report["summary"])}</p>{gone}</header>'
    )


def _overview(groups: Sequence[dict[str, Any]], figures: ReportFigures) -> str:
    """All groups in one table and one figure; empty for a single group."""
    if len(groups) < 2:
        return ""
    body = []
    for group in groups:
        for arm in group["arms"][1:]:
            relative = arm["relative"]
            base = group["arms"][0]
            cells = [arm["label"], number(base["validation_loss"], 4)]
            cells += [number(arm["validation_loss"], 4)]
            if relative is None:
                body.append(row(group["name"], [*cells, "not paired", "", "", ""]))
                continue
            interval = relative["seeds"]
            low, high = signed(interval["low"], 4), signed(interval["high"], 4)
            reason = f"no interval: {interval['no_interval']}"
            more = with_change(
                signed(relative["validation_nats"], 4),
                f"{low} to {high}" if interval["low"] is not None else reason,
            )
            for key, digits in (("loss_gain_percent", 2), ("perplexity_percent", 1)):
                more += f"<td>{escape(signed(relative[key], digits, ' %'))}</td>"
            ratio = relative["efficiency"]["ratio"]
            more += f"<td>{f'{ratio:.2f} ×' if ratio else '–'}</td>"
            body.append(row(group["name"], cells, more))
    heads = ["", "arm", "baseline", "loss", "difference", "gain", "perplexity", "fewer tokens"]
    text = (
        "Change of perplexity to the baseline of the same group; bars are 95 % intervals over "
        "seeds, if there are enough seeds."
    )
    counted = sum(group["comparisons"]["seeds"] for group in groups)
    notes = caption(
        "Loss in nats per token. Gain: improvement of the loss, as the papers state it. Fewer "
        "tokens: how many times fewer tokens the arm needs to reach the baseline's final loss. "
        + comparisons_note(counted),
        "note",
    )
    drawn = figure(figures["gains"], "Perplexity change by group", text)
    return section("All comparisons", table(heads, body) + notes + drawn)


def _comparison(group: dict[str, Any]) -> str:
    """Table of every figure, one column per arm; for many arms, first a table with one row per
    arm."""
    arms = group["arms"]
    notes = []
    if any(arm.get("relative") for arm in arms):
        notes.append(f"Small figures: change against {escape(arms[0]['label'])}.")
    if speed_note(group):
        notes.append(escape(speed_note(group)))
    for note in (load_note(group), group["loss_note"], within_note(group)):
        if note:
            notes.append(escape(note))
    if note := comparisons_note(group["comparisons"]["seeds"]):
        notes.append(note)
    if any(len(arm["seeds"]) > 1 for arm in arms):
        notes.append("Figures are means over seeds, differences means over the pairs of one seed.")
    rows = comparison_rows(group)
    tables = [_standing(arms)] if len(arms) > COLUMNS else []
    for first in range(0, len(arms), COLUMNS):
        tables.append(_figures(rows, arms, range(first, min(first + COLUMNS, len(arms)))))
    return section("Comparison", "".join(tables) + caption(" ".join(notes), "note"))


def _figures(rows: Sequence[ComparisonRow], arms: Sequence[dict[str, Any]], columns: range) -> str:
    """The complete table of some of the arms."""
    body = []
    for name, of_section in groupby(rows, key=lambda one: one.section):
        body.append(f'<tr class="section"><th colspan="{len(columns) + 1}">{name}</th></tr>')
        for one in of_section:
            cells = "".join(with_change(*one.cells[column]) for column in columns)
            body.append(f'<tr><th scope="row">{escape(one.name)}</th>{cells}</tr>')
    heads = ["", *(arm_title(arms[column]) for column in columns)]
    return table(heads, body, colored=True, first=columns.start)


def _standing(arms: Sequence[dict[str, Any]]) -> str:
    """The arms by loss, best first."""
    known = [arm for arm in arms if arm["validation_loss"] is not None]
    body = []
    for arm in sorted(known, key=lambda arm: arm["validation_loss"]):
        relative = arm.get("relative") or {}
        parameters = arm["parameters"] or {}
        cells = [number(parameters.get("input_embedding"), 0), number(parameters.get("total"), 0)]
        cells.append(number(arm["validation_loss"], 4))
        cells.append(signed(relative.get("validation_nats"), 4))
        cells += [
            signed(relative.get(key), digits, " %")
            for key, digits in (("loss_gain_percent", 2), ("perplexity_percent", 1))
        ]
        body.append(row(arm_title(arm), cells))
    heads = ["", "input embedding", "parameters", "loss", "difference", "gain", "perplexity"]
    return table(heads, body)


def _curve_caption(group: dict[str, Any]) -> str:
    curves = group["curves"]
    width = plots.smoothing_width(len(curves[0]["train"]["at"]))
    text = "Dots: loss on the full validation split, computed by the training loop."
    if width > 1:
        text = f"Line: mean of {width} logged training losses. {text}"
    if any(curve["seeds"] > 1 for curve in curves):
        text += " Bands span the minimum and maximum over seeds."
    if any(curve["difference"] for curve in curves):
        text += (
            " Below: training loss minus that of the baseline on the same batches, so their "
            "common noise cancels. Below zero is better than the baseline."
        )
    return text


def _subsets(group: dict[str, Any]) -> str:
    tables = [arm["by_subset"] or {} for arm in group["arms"]]
    names = sorted({name for one in tables for name in one})
    if len(names) < 2:
        return ""
    body = []
    for name in names:
        losses = [one.get(name, {}).get("nats_per_token") for one in tables]
        tokens = max(one.get(name, {}).get("tokens", 0) for one in tables)
        body.append(row(name, [f"{tokens:,}", *(number(loss, 3) for loss in losses)]))
    heads = ["subset", "targets", *(arm["label"] for arm in group["arms"])]
    return table(heads, body) + caption("Nats per token.", "note")


def _seeds(group: dict[str, Any]) -> str:
    """Every pair, and the test over all pairs."""
    arms = [arm for arm in group["arms"][1:] if len(arm["pairs"]) > 1]
    if not arms:
        return ""
    seeds = list(dict.fromkeys(pair["seed"] for arm in arms for pair in arm["pairs"]))
    body = []
    for seed in seeds:
        cells = []
        for arm in arms:
            own = [pair["validation_nats"] for pair in arm["pairs"] if pair["seed"] == seed]
            cells.append(signed(own[0] if own else None, 4))
        body.append(row(f"seed {seed}", cells))
    for name, key in (("mean", "mean"), ("standard deviation", "std"), ("p, two-sided", "p")):
        cells = []
        for arm in arms:
            value = arm["relative"]["seeds"][key]
            cells.append(signed(value, 4) if key == "mean" else number(value, 4))
        body.append(row(name, cells))
    text = (
        f"Validation loss minus that of {escape(group['arms'][0]['label'])} with the same seed, "
        "nats. The seed determines the initial weights and the order of the data. p is from "
        "Student's paired t-test of a zero mean; with few seeds, the test detects a small "
        "difference only if it is consistent across seeds."
    )
    reasons = {arm["label"]: arm["relative"]["seeds"]["no_interval"] for arm in arms}
    for label, reason in reasons.items():
        text += f" No interval and no p for {escape(label)}: {reason}." if reason else ""
    return table(["", *(arm["label"] for arm in arms)], body) + caption(text, "note")


def _guide(report: dict[str, Any]) -> str:
    items = [
        "<b>Nats per token</b>: mean of −ln p(target) over all targets; lower is better. "
        "<b>Perplexity</b> is its exponential. Both depend on the tokenizer; <b>bits per byte</b> "
        "does not.",
        "A <b>percentage</b> is a change relative to the baseline: −2 % perplexity is better, "
        "−2 % tokens per second is slower. Only <b>loss improvement</b> is positive where better, "
        "as the papers print it.",
        "An <b>interval over documents</b> covers the choice of the held-out documents; it "
        "does not cover another seed, another learning rate or a longer run. An <b>interval "
        "over seeds</b> covers the variation of initial weights and data order.",
        f"There is <b>no interval</b> below {MIN_SPARE + 1} seeds or {MIN_SAMPLED} documents or "
        "samples, or if all observations are identical: it would be too narrow.",
        "<b>Tokens to the baseline's final loss</b> are interpolated on the validation curve "
        "(on the smoothed training curve if it has fewer than three points).",
        "<b>Downstream</b> figures are the metric ± its standard error over samples; models "
        "whose values differ by less than about two standard errors are not distinguishable on "
        "that task.",
        "<b>Tokens per second</b> is the median over logged steps, excluding the first; it "
        "applies only to the node and date shown.",
    ]
    if any(run["tokens"] < SMALL_RUN_TOKENS for run in report["runs"]):
        items.insert(
            0,
            "Runs of this size verify the pipeline and provide paired data; they do not show "
            "<b>which model is better</b>.",
        )
    listed = "".join(f"<li>{item}</li>" for item in items)
    folders = "".join(
        f"<li>{escape(run['arm'])}: <code>{escape(run['path'])}</code></li>"
        for run in report["runs"]
    )
    return section(
        "How to read this",
        f"<ul>{listed}</ul><details><summary>{len(report['runs'])} run "
        f"directories</summary><ul>{folders}</ul></details>"
        + caption(
            "Every number of this page is in <code>report.json</code> and the CSV files in the "
            "same directory, every figure as SVG and PNG in <code>plots/</code>. "
            "<code>runs.csv</code> is a table for <code>leviathan fit</code>.",
            "note",
        ),
    )
