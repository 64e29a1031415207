"""Results of the preflight checks: findings with a level, and the figures behind them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from leviathan.errors import LeviathanError

Level = Literal["ok", "warning", "error"]
ORDER: tuple[Level, ...] = ("ok", "warning", "error")
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check; `message` says what was found and what to do."""

    subject: str
    level: Level
    message: str


@dataclass
class Report:
    """Findings in the order of the checks, and figures for `--json`."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, subject: str, level: Level, message: str) -> None:
        """Adds a finding."""
        self.findings.append(Finding(subject, level, message))

    @contextmanager
    def catching(self, subject: str) -> Iterator[None]:
        """Turns a user's error into a finding, so that the remaining checks run."""
        try:
            yield
        except LeviathanError as error:
            self.add(subject, "error", str(error))
        except OSError as error:
            self.add(subject, "error", f"{error.filename or subject}: {error.strerror}")

    @property
    def level(self) -> Level:
        """The highest level of all findings."""
        levels: list[Level] = [finding.level for finding in self.findings]
        return max(levels, key=ORDER.index) if levels else "ok"

    def as_dict(self) -> dict[str, Any]:
        """The report for `--json`."""
        findings = [asdict(finding) for finding in self.findings]
        return {"level": self.level, "findings": findings, **self.figures}


def table(report: dict[str, Any]) -> str:
    """Formats `Report.as_dict` for the terminal."""
    from rich.table import Table
    from rich.text import Text

    from leviathan.console import as_text

    shown = Table(title="Preflight checks", title_justify="left")
    for head in ("check", "result", "details"):
        shown.add_column(head, overflow="fold")
    for finding in report["findings"]:
        level = Text(finding["level"], style=_STYLES[finding["level"]])
        shown.add_row(finding["subject"], level, Text(finding["message"]))
    counts = [
        f"{count} {level}{'s' if count > 1 else ''}"
        for level in ("error", "warning")
        if (count := sum(finding["level"] == level for finding in report["findings"]))
    ]
    outcome = "Failed" if report["level"] == "error" else "Passed"
    return f"{as_text(shown)}\n{' with '.join([outcome, *filter(None, [' and '.join(counts)])])}."
