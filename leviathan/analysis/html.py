"""Elements of an HTML page: sections, tables, figures."""

from collections.abc import Iterable
from html import escape

from leviathan.analysis.figure import COLORS, ReportFigure
from leviathan.analysis.style import CSS


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
