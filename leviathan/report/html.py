"""The report as one HTML page without scripts or external resources; light, dark and in print."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from leviathan.evaluate.intervals import MIN_SAMPLED, MIN_SPARE, comparisons_note
from leviathan.report import figures as plots
from leviathan.report.figures import COLORS, FONT, GRID, INK, MUTED, ReportFigure
from leviathan.report.summary import SMALL_RUN_TOKENS
from leviathan.report.tables import (
    MISSING,
    ComparisonRow,
    arm_title,
    comparison_rows,
    load_note,
    number,
    score,
    signed,
    speed_note,
    task_scale,
    within_note,
)

# ---------------------------------------------------------------- style sheet

_DARK_COLORS = (
    "#9aa4af",
    "#58b0f0",
    "#ff9455",
    "#3fc79a",
    "#d68fc4",
    "#e0b040",
    "#9cc9ec",
    "#c89a78",
)


def _variables(ink: str, muted: str, grid: str, paper: str, colors: tuple[str, ...]) -> str:
    series = "".join(f"--series-{number}: {color};" for number, color in enumerate(colors))
    return f"--ink: {ink}; --muted: {muted}; --grid: {grid}; --paper: {paper}; {series}"


_LIGHT = _variables(INK, MUTED, GRID, "#ffffff", COLORS)
_DARK = _variables("#e6e9ed", "#9aa4af", "#343b44", "#14181d", _DARK_COLORS)
_SERIES = "".join(
    f"thead .series-{number} {{ color: var(--series-{number}); }}" for number in range(len(COLORS))
)

CSS = f"""
:root {{ {_LIGHT} color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ {_LIGHT} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 {FONT}; }}
main {{ max-width: 54rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }}
.eyebrow {{ margin: 0; color: var(--muted); font-size: .85rem; }}
h1 {{ font-size: 2rem; line-height: 1.2; margin: .2rem 0 .8rem; letter-spacing: -.015em; }}
h2 {{ font-size: 1.2rem; margin: 0 0 .8rem; }}
h3 {{ font-size: .95rem; margin: 1.6rem 0 .4rem; }}
section {{ margin-top: 2.75rem; }}
p, li, figcaption {{ max-width: 44rem; }}
.question {{ font-size: 1.15rem; margin: 0 0 .9rem; color: var(--muted); }}
h2.group {{ font-size: 1.5rem; margin: 3.5rem 0 -1.5rem; padding-top: 1rem;
  border-top: 2px solid var(--grid); }}
summary {{ cursor: pointer; font-size: .95rem; }}
.summary {{ font-size: 1.08rem; margin: 0; }}
figure {{ margin: 0; }}
figcaption, .note {{ color: var(--muted); font-size: .86rem; }}
figcaption {{ margin-top: .5rem; }}
figure svg {{ display: block; width: 100%; height: auto; }}
.narrow {{ display: none; }}
.scroll {{ overflow-x: auto; }}
.scroll + .scroll {{ margin-top: 1.4rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .34rem 0 .34rem .8rem; border-bottom: 1px solid var(--grid);
  vertical-align: baseline; white-space: nowrap; }}
th:first-child {{ text-align: left; padding-left: 0; font-weight: 400; }}
thead th {{ border-bottom: 1px solid var(--muted); color: var(--muted); font-weight: 600; }}
{_SERIES}
.section th {{ color: var(--muted); font-size: .8rem; padding-top: 1.1rem; }}
.change {{ display: block; color: var(--muted); font-size: .8rem; line-height: 1.2; }}
td.text {{ white-space: normal; overflow-wrap: anywhere; }}
.no {{ font-weight: 700; color: var(--series-2); }}
.yes {{ color: var(--muted); }}
code {{ font-size: .9em; overflow-wrap: anywhere; }}
@media (max-width: 40rem) {{
  .wide {{ display: none; }} .narrow {{ display: block; }}
  main {{ padding: 1.5rem 1rem 3rem; }} h1 {{ font-size: 1.6rem; }}
  tbody th:first-child {{ white-space: normal; }}
  .buckets tbody th:first-child {{ white-space: nowrap; }}
  th, td {{ padding-left: .7rem; }} .buckets td, .buckets th {{ font-size: .84rem; }}
  .buckets td, .buckets th:not(:first-child) {{ padding-left: .45rem; }}
}}
@media print {{
  body {{ font-size: 10.5pt; }} main {{ max-width: none; padding: 0; }}
  .wide {{ display: block; }} .narrow {{ display: none; }}
  section {{ margin-top: 1.6rem; }} figure, tr {{ break-inside: avoid; }}
  h2, h3 {{ break-after: avoid; }} .scroll {{ overflow: visible; }}
  table {{ font-size: 8.5pt; }} th, td {{ padding: .2rem 0 .2rem .5rem; }}
  h2.group {{ break-before: page; border-top: 0; margin-top: 0; }}
}}
"""


# ---------------------------------------------------------------- elements


def document(title: str, content: str) -> str:
    """A complete page, without scripts or external resources."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} · Leviathan report</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """A section with a title; an empty text if there is no content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n" if content else ""


def caption(text: str, kind: str = "") -> str:
    """A paragraph; `text` is trusted HTML or contains no markup."""
    return f'<p class="{kind}">{text}</p>' if text else ""


def figure(drawn: ReportFigure, name: str, text: str) -> str:
    """A figure, wide and narrow, with its caption (trusted HTML)."""
    images = "".join(
        f'<div class="{form}" role="img" aria-label="{escape(name)}">{svg}</div>'
        for form, svg in (("wide", drawn.wide), ("narrow", drawn.narrow))
    )
    return f"<figure>{images}<figcaption>{text}</figcaption></figure>"


def table(heads: Iterable[str], body: Iterable[str], colored: bool = False, first: int = 0) -> str:
    """A table that scrolls horizontally on a narrow screen.

    Args:
        heads: column headers; the first is that of the row names.
        body: rows, as HTML.
        colored: whether the columns have the colors of the series in the figures.
        first: index of the series of the first colored column.
    """

    def mark(number: int) -> str:
        series = (first + number - 1) % len(COLORS)
        return f' class="series-{series}"' if colored and number else ""

    head = "".join(
        f'<th scope="col"{mark(number)}>{escape(text)}</th>' for number, text in enumerate(heads)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def row(name: str, cells: Iterable[str], more: str = "") -> str:
    """A table row of texts; `more` is trusted HTML that follows."""
    shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(name)}</th>{shown}{more}</tr>'


def with_change(value: str, change: str) -> str:
    """A cell with a small second line."""
    small = f'<span class="change">{escape(change)}</span>' if change else ""
    return f"<td>{escape(value)}{small}</td>"


# ---------------------------------------------------------------- sections

_MAX_COLUMNS = 4  # maximum number of columns of losses and differences on a page
_LOSSES = 5  # maximum number of columns of losses only
_SCALE_TITLES = {
    "absolute": "By occurrences in the training split",
    "relative": "By share of the training tokens",
}


def by_frequency(group: dict[str, Any], drawn: ReportFigure | None) -> str:
    """Loss by training frequency of the target: figure and tables."""
    buckets = group["frequency"]
    if buckets is None or drawn is None:
        return caption(
            "Not computed: run <code>leviathan frequency</code> on the checkpoints first."
        )
    text = "Validation targets, sorted into buckets by how often the token occurs in training."
    if buckets["pairs"]:
        text += (
            " Below: paired difference with its 95 % interval over documents, for ten documents or "
            "more. The interval does not include the variation between seeds. "
        )
        text += comparisons_note(group["comparisons"]["frequency"])
    tables = [_bucket_table(buckets, scale) for scale in _SCALE_TITLES]
    name = "Loss by training frequency of the target"
    return figure(drawn, name, text) + "".join(tables)


def _bucket_table(buckets: dict[str, Any], scale: str) -> str:
    """Tables of losses, with the differences in the same table or below it."""
    runs, pairs = buckets["runs"], buckets["pairs"]
    total = sum(one["tokens"] for one in runs[0][scale])
    kept = [(index, one) for index, one in enumerate(runs[0][scale]) if one["tokens"]]
    inline = pairs if len(runs) + len(pairs) <= _MAX_COLUMNS else []
    tables = []
    for first in range(0, len(runs), _LOSSES):
        some, body = runs[first : first + _LOSSES], []
        for index, one in kept:
            cells = [f"{one['tokens']:,}", plots.share(one["tokens"] / total)]
            cells += [number(run[scale][index]["nats_per_token"], 3) for run in some]
            body.append(
                row(one["bucket"], cells, "".join(_interval(pair[scale][index]) for pair in inline))
            )
        heads = ["bucket", "targets", "share", *(run["label"] for run in some)]
        heads += [f"{pair['label']} − {pair['base']}" for pair in inline]
        tables.append(table(heads, body))
    separate = pairs if not inline else []
    for first in range(0, len(separate), _MAX_COLUMNS):
        few = separate[first : first + _MAX_COLUMNS]
        body = [
            row(one["bucket"], [], "".join(_interval(pair[scale][index]) for pair in few))
            for index, one in kept
        ]
        heads = [f"minus {few[0]['base']}", *(pair["label"] for pair in few)]
        tables.append(table(heads, body))
    return (
        f"<h3>{_SCALE_TITLES[scale]}, nats per token</h3>"
        f'<div class="buckets">{"".join(tables)}</div>'
    )


def _interval(one: dict[str, Any]) -> str:
    low, high = signed(one["low"], 3), signed(one["high"], 3)
    if one["low"] is None:
        reason = f"no interval: {one['no_interval']}" if one["no_interval"] else ""
        return with_change(signed(one["difference"], 3), reason)
    return with_change(signed(one["difference"], 3), f"{low} to {high}")


def downstream(group: dict[str, Any]) -> str:
    """Tasks of lm-eval, one column per arm."""
    if not group["tasks"]:
        return ""
    body = []
    for one in group["tasks"]:
        cells = [f"{one['arms'][0]['samples']:,}" if one["arms"][0]["samples"] else MISSING]
        shown = "".join(
            with_change(score(cell, one["metric"]), _is_significant(cell, one["metric"]))
            for cell in one["arms"]
        )
        body.append(row(f"{one['task']}, {one['metric']}", cells, shown))
    heads = ["task", "samples", *(arm["label"] for arm in one_row_arms(group))]
    text = (
        "± standard error over samples. Small figures: difference to the baseline, and in units of "
        "the combined standard error (σ); below about 2 σ the difference is not significant. "
    )
    text += comparisons_note(group["comparisons"]["tasks"], "exceed 2 σ")
    return table(heads, body) + caption(text, "note")


def one_row_arms(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms in the order of the columns of the tasks."""
    return group["tasks"][0]["arms"]


def _is_significant(cell: dict[str, Any], metric: str) -> str:
    reason = f"no ±: {cell['no_interval']}" if cell.get("no_interval") else ""
    if cell.get("difference") is None:
        return reason
    scale, _, digits = task_scale(metric)
    text = signed(scale * cell["difference"], digits)
    if reason:
        return f"{text}; {reason}"
    return f"{text} ({signed(cell['sigmas'], 1)} σ)" if cell.get("sigmas") is not None else text


def swept(group: dict[str, Any], drawn: ReportFigure | None) -> tuple[str, str]:
    """Title and content of the section on a sweep; empty without a sweep."""
    found = group["sweep"]
    if not found or drawn is None:
        return "Sweep", ""
    settings = list(dict.fromkeys(p["swept"] for arm in found["arms"] for p in arm["points"]))
    body = []
    for setting in settings:
        cells = ""
        for arm in found["arms"]:
            index, point = next(
                ((i, p) for i, p in enumerate(arm["points"]) if p["swept"] == setting),
                (None, None),
            )
            text = escape(number(point["loss"] if point else None, 4))
            best = index is not None and index == arm["best"]
            trained = escape(f"train {number(point['train_loss'], 4)}") if point else ""
            small = f'<span class="change">{trained}</span>'
            cells += f"<td>{f'<b>{text}</b>' if best else text}{small}</td>"
        body.append(row(setting, [], cells))
    ends = [arm["label"] for arm in found["arms"] if arm["at_the_end"]]
    text = (
        "Validation loss, nats per token. Small: training loss, mean of the last tenth of the "
        "steps. Bold: the value with the lowest training loss. The validation split compares the "
        "arms, so it is not used to choose their values."
    )
    if ends:
        text += (
            f" The chosen value of {escape(', '.join(ends))} is at an end of the tested range: a "
            "value outside the range may be better."
        )
    text += " All results below compare each arm at its chosen values."
    heads = ["", *(arm["label"] for arm in found["arms"])]
    drawing = figure(drawn, "Loss over the swept value", text)
    return f"Sweep of {', '.join(found['keys'])}", drawing + table(heads, body, colored=True)


def fairness(group: dict[str, Any]) -> str:
    """The checks that decide whether differences are computed."""
    pairing = group["pairing"]
    if len(group["arms"]) < 2:
        return ""
    body = []
    for check in pairing["checks"]:
        mark = (
            '<span class="yes">same</span>'
            if check["same"]
            else ('<span class="no">different</span>')
        )
        text = "<br>".join(escape(str(value)) for value in check["values"])
        name = escape(check["check"])
        body.append(
            f'<tr><th scope="row">{name}</th><td>{mark}</td><td class="text">{text}</td></tr>'
        )
    note = pairing["note"] or (
        "Every run saw the same tokens in the same order as its counterpart of the baseline, "
        "so their losses are compared pairwise."
    )
    if group["sweep"]:
        note += " Each arm has its own swept values, chosen by training loss, so these differ."
    if group["loss_note"]:
        note += f" {group['loss_note']}"
    refused = "".join(
        f"<li><code>{escape(one['run'])}</code>: {escape(', '.join(one['differs']))}</li>"
        for one in pairing["unequal"]
    )
    return (
        caption(escape(note))
        + (f"<ul>{refused}</ul>" if refused else "")
        + table(["", "", "value"], body)
    )


def what_differs(group: dict[str, Any]) -> str:
    """Configuration keys in which the arms differ."""
    if len(group["arms"]) < 2:
        return ""
    rows = group["config_differences"]
    if not rows:
        return caption("The runs have the same configuration.")
    body = [
        row(one["key"], [MISSING if value is None else str(value) for value in one["values"]])
        for one in rows
    ]
    heads = ["key", *(arm["label"] for arm in group["arms"])]
    return table(heads, body) + caption("All other keys are equal.", "note")


# ---------------------------------------------------------------- page

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
    """Table of every figure, one column per arm; many arms first have a table by rows."""
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
