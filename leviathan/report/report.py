"""`leviathan report`: one self-contained page, and every number and figure as a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leviathan.files import check_writable_file, write_atomic
from leviathan.report.compare import compare
from leviathan.report.html import draw_figures, report_page
from leviathan.report.tables import csv_files, terminal_table


def build_report(runs: Sequence[Path], out: Path, allow_unequal: bool = False) -> dict[str, Any]:
    """Writes `report.html`, `report.json`, CSV tables and `plots/` into `out`.

    Args:
        runs: run directories, the baseline first; or one experiment (its YAML file or directory).
        out: output directory; created if it does not exist.
        allow_unequal: also compare runs that differ in data, order, tokenizer or budget.

    Returns:
        Every number of the report; "files" contains the paths of its parts.

    Raises:
        DataError: `out` cannot be written, a directory is not a run, one of its files is corrupt,
            or no two runs are comparable.
    """
    files = {"html": out / "report.html", "json": out / "report.json"}
    for file in (*files.values(), out / "plots" / "curves.svg"):
        check_writable_file(file)
    report = compare(runs, allow_unequal)
    figures = draw_figures(report)
    out.mkdir(parents=True, exist_ok=True)
    plots = [file for one in figures.values() for file in one.save(out / "plots")]
    tables = csv_files(report)
    for name, text in tables.items():
        write_atomic(out / name, text.encode())
    report["files"] = {kind: str(file) for kind, file in files.items()} | {
        "csv": [str(out / name) for name in tables],
        "plots": [str(file) for file in plots],
    }
    write_atomic(files["html"], report_page(report, figures).encode())
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(files["json"], text.encode())
    return report


def report_text(report: dict[str, Any]) -> str:
    """Tables and conclusions of the report as text."""
    return terminal_table(report)
