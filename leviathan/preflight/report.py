"""What a check finds: rows with a verdict each, and the figures behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from leviathan.errors import LeviathanError

Verdict = Literal["green", "amber", "red"]
ORDER: tuple[Verdict, ...] = ("green", "amber", "red")


@dataclass(frozen=True)
class Row:
    """One thing that was looked at; `why` says what was found or what to do."""

    what: str
    verdict: Verdict
    why: str


@dataclass
class Report:
    """Rows in the order of looking, and figures for `--json`."""

    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def say(self, what: str, verdict: Verdict, why: str) -> None:
        """Adds a row."""
        self.rows.append(Row(what, verdict, why))

    @contextmanager
    def about(self, what: str) -> Iterator[None]:
        """What a user must mend becomes a red row, so that the rest is looked at as well."""
        try:
            yield
        except LeviathanError as error:
            self.say(what, "red", str(error))
        except OSError as error:
            self.say(what, "red", f"{error.filename or what}: {error.strerror}")

    @property
    def verdict(self) -> Verdict:
        """The worst of all rows."""
        worst: Verdict = "green"
        for row in self.rows:
            if ORDER.index(row.verdict) > ORDER.index(worst):
                worst = row.verdict
        return worst

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        rows = [asdict(row) for row in self.rows]
        return {"verdict": self.verdict, "rows": rows, **self.figures}


def table(report: dict[str, Any]) -> str:
    """`Report.as_dict` as people read it."""
    from rich.table import Table
    from rich.text import Text

    from leviathan.console import as_text

    styles = {"green": "green", "amber": "yellow", "red": "bold red"}
    shown = Table(title="Before the launch", title_justify="left")
    for head in ("", "verdict", "found, and what to do"):
        shown.add_column(head, overflow="fold")
    for row in report["rows"]:
        verdict = Text(row["verdict"], style=styles[row["verdict"]])
        shown.add_row(row["what"], verdict, Text(row["why"]))
    counts = {v: sum(row["verdict"] == v for row in report["rows"]) for v in ORDER}
    ends = {
        "green": "Ready.",
        "amber": "Ready, if the amber rows are meant so.",
        "red": "Not ready: mend the red rows first.",
    }
    told = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    return f"{as_text(shown)}\n{told}. {ends[report['verdict']]}"


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count / 1e3:,.1f} kB"


def duration(seconds: float) -> str:
    """Time as people read it."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s"
