"""The report as one HTML page: no script, no external resource; light, dark and on paper."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

from leviathan.analysis import plots
from leviathan.analysis.style import CSS
from leviathan.analysis.table import MISSING, comparison_rows, number, signed
from leviathan.analysis.verdict import SMALL_RUN_TOKENS

_SCALE_TITLES = {
    "absolute": "By occurrences in the training split",
    "relative": "By share of the training tokens",
}


def page(report: dict[str, Any]) -> str:
    """The whole document."""
    labels = [run["label"] for run in report["runs"]]
    title = " vs ".join(reversed(labels)) if len(labels) == 2 else ", ".join(labels)
    sections = [
        _header(report, title),
        _comparison(report, labels),
        _curves(report),
        _frequency(report),
        _subsets(report, labels),
        _pairing(report, labels),
        _differences(report, labels),
        _guide(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} · Leviathan report</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}\n</main>\n</body>\n</html>\n"
    )


def _header(report: dict[str, Any], title: str) -> str:
    return (
        f'<header><p class="eyebrow">Leviathan · run comparison</p><h1>{escape(title)}</h1>'
        f'<p class="verdict">{escape(report["verdict"])}</p></header>'
    )


def _comparison(report: dict[str, Any], labels: Sequence[str]) -> str:
    body = []
    rows = comparison_rows(report)
    for section, group in groupby(rows, key=lambda row: row.section):
        body.append(f'<tr class="section"><th colspan="{len(labels) + 1}">{section}</th></tr>')
        for row in group:
            cells = "".join(
                f'<td>{escape(value)}<span class="change">{escape(change)}</span></td>'
                if change
                else f"<td>{escape(value)}</td>"
                for value, change in row.cells
            )
            body.append(f'<tr><th scope="row">{escape(row.name)}</th>{cells}</tr>')
    note = "Small figures: change against the first run." if report["pairing"]["paired"] else ""
    return _section(
        "Comparison", _table(["", *labels], body, coloured=True) + _caption(note, "note")
    )


def _curves(report: dict[str, Any]) -> str:
    curves, paired = report["curves"], report["pairing"]["paired"]
    width = plots.smoothing_width(len(curves[0]["step"]))
    caption = "Dots: loss on the whole validation split, where the training loop computed it."
    if width > 1:
        caption = (
            f"Line: mean of {width} logged training losses, the faint line unsmoothed. {caption}"
        )
    if paired:
        caption += (
            " Below: training loss minus that of the first run on the same batches, so the noise "
            "that both share cancels. Below zero is better than the first run."
        )
    drawings = [plots.loss_curves(curves, paired, narrow) for narrow in (False, True)]
    return _section("Loss during training", _figure(drawings, "Loss curves", caption))


def _frequency(report: dict[str, Any]) -> str:
    strata = report["frequency"]
    if strata is None:
        return _section(
            "Loss by training frequency",
            _caption(
                "Not computed: run <code>leviathan frequency</code> on the checkpoints first."
            ),
        )
    drawings = [plots.frequency(strata, "absolute", narrow) for narrow in (False, True)]
    caption = "Validation targets, sorted into buckets by how often the token occurs in training."
    if strata["pairs"]:
        caption += (
            " Below: paired difference with its 95 % interval, from resampling documents. The "
            "interval does not cover the luck of the seed."
        )
    tables = [_strata_table(strata, scale) for scale in _SCALE_TITLES]
    return _section(
        "Loss by training frequency",
        _figure(drawings, "Loss by training frequency of the target", caption) + "".join(tables),
    )


def _strata_table(strata: dict[str, Any], scale: str) -> str:
    runs, pairs = strata["runs"], strata["pairs"]
    total = sum(row["tokens"] for row in runs[0][scale])
    body = []
    for index, row in enumerate(runs[0][scale]):
        if not row["tokens"]:
            continue
        cells = [f"{row['tokens']:,}", plots.share(row["tokens"] / total)]
        cells += [number(run[scale][index]["nats_per_token"], 3) for run in runs]
        intervals = "".join(_interval(pair[scale][index]) for pair in pairs)
        body.append(_row(row["bucket"], cells, intervals))
    heads = ["bucket", "targets", "share", *(run["label"] for run in runs)]
    heads += [f"{pair['label']} − {pair['base']}" for pair in pairs]
    table = f'<div class="buckets">{_table(heads, body)}</div>'
    return f"<h3>{_SCALE_TITLES[scale]}, nats per token</h3>{table}"


def _interval(row: dict[str, Any]) -> str:
    low, high = signed(row["low"], 3), signed(row["high"], 3)
    note = "" if row["low"] is None else f'<span class="change">{low} to {high}</span>'
    return f"<td>{signed(row['difference'], 3)}{note}</td>"


def _subsets(report: dict[str, Any], labels: Sequence[str]) -> str:
    tables = [run["by_subset"] or {} for run in report["runs"]]
    names = sorted({name for table in tables for name in table})
    if len(names) < 2:
        return ""
    body = []
    for name in names:
        losses = [table.get(name, {}).get("nats_per_token") for table in tables]
        tokens = max(table.get(name, {}).get("tokens", 0) for table in tables)
        body.append(_row(name, [f"{tokens:,}", *(number(loss, 3) for loss in losses)]))
    table = _table(["subset", "targets", *labels], body)
    return _section("Validation loss by subset", table + _caption("Nats per token.", "note"))


def _pairing(report: dict[str, Any], labels: Sequence[str]) -> str:
    if len(labels) < 2:
        return ""
    body = []
    for check in report["pairing"]["checks"]:
        mark = (
            '<span class="yes">same</span>' if check["same"] else '<span class="no">not same</span>'
        )
        values = check["values"]
        shown = values[:1] if check["same"] else values
        text = "<br>".join(escape(str(value)) for value in shown)
        name = escape(check["check"])
        body.append(
            f'<tr><th scope="row">{name}</th><td>{mark}</td><td class="text">{text}</td></tr>'
        )
    note = report["pairing"]["note"] or (
        "All runs saw the same tokens in the same order, so their losses are compared pairwise."
    )
    return _section("Is the comparison fair?", _caption(note) + _table(["", "", "value"], body))


def _differences(report: dict[str, Any], labels: Sequence[str]) -> str:
    if len(labels) < 2:
        return ""
    rows = report["config_differences"]
    if not rows:
        return _section("Configuration", _caption("The runs have the same configuration."))
    body = [
        _row(row["key"], [MISSING if value is None else str(value) for value in row["values"]])
        for row in rows
    ]
    return _section(
        "What was set differently",
        _table(["key", *labels], body) + _caption("Everything else is equal.", "note"),
    )


def _guide(report: dict[str, Any]) -> str:
    items = [
        "<b>Nats per token</b>: mean of −ln p(target) over all targets; lower is better. "
        "<b>Perplexity</b> is its exponential. Both depend on the tokenizer; <b>bits per byte</b> "
        "does not.",
        "A <b>percentage</b> is a change relative to the first run: −2 % perplexity is better, "
        "−2 % tokens per second is slower.",
        "An <b>interval</b> over documents says how much the difference depends on which documents "
        "were held out. It says nothing about another seed, another learning rate or a longer run.",
        "<b>lm-eval</b> figures are the metric ± its standard error over samples; two models whose "
        "values lie within about two standard errors are not told apart by that task.",
        "<b>Tokens per second</b> is the median over logged steps; the first is left out.",
    ]
    if any(run["tokens"] < SMALL_RUN_TOKENS for run in report["runs"]):
        items.insert(
            0,
            "A run of this size shows <b>mechanics and paired data</b>, not which model is better.",
        )
    listed = "".join(f"<li>{item}</li>" for item in items)
    folders = "".join(
        f"<li>{escape(run['label'])}: <code>{escape(run['path'])}</code></li>"
        for run in report["runs"]
    )
    return _section(
        "How to read this",
        f"<ul>{listed}</ul><h3>Runs</h3><ul>{folders}</ul>"
        + _caption("Every number of this page is in <code>report.json</code> beside it.", "note"),
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>\n"


def _caption(text: str, kind: str = "") -> str:
    """A paragraph; `text` is HTML of ours or free of markup."""
    return f'<p class="{kind}">{text}</p>' if text else ""


def _figure(drawings: Sequence[str], name: str, caption: str) -> str:
    images = "".join(
        f'<div class="{size}" role="img" aria-label="{escape(name)}">{svg}</div>'
        for size, svg in zip(("wide", "narrow"), drawings, strict=True)
    )
    return f"<figure>{images}<figcaption>{caption}</figcaption></figure>"


def _table(heads: Iterable[str], body: Iterable[str], coloured: bool = False) -> str:
    def mark(number: int) -> str:
        return f' class="series-{number - 1}"' if coloured and number else ""

    head = "".join(
        f'<th scope="col"{mark(number)}>{escape(text)}</th>' for number, text in enumerate(heads)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _row(name: str, cells: Iterable[str], more: str = "") -> str:
    """A table row of texts; `more` is HTML of ours that follows."""
    shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(name)}</th>{shown}{more}</tr>'
