"""Sections of the report page: frequency, tasks, sweeps, fairness checks."""

from html import escape
from typing import Any

from leviathan.analysis import plots
from leviathan.analysis.figure import ReportFigure
from leviathan.analysis.html import caption, figure, row, table, with_change
from leviathan.analysis.table import MISSING, number, score, signed, task_scale
from leviathan.evaluate.intervals import comparisons_note

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
