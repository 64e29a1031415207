"""`leviathan report`: one self-contained page, and every number and drawing of it as a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leviathan.analysis.compare import compare
from leviathan.analysis.export_csv import csv_files
from leviathan.analysis.page import draw_figures, report_page
from leviathan.analysis.table import terminal_table
from leviathan.files import check_writable_file, write_atomic

__all__ = ["build_report", "report_text", "terminal_table"]


def build_report(runs: Sequence[Path], out: Path, allow_unequal: bool = False) -> dict[str, Any]:
    """Writes `report.html`, `report.json`, CSV tables and `plots/` into `out`.

    Args:
        runs: run folders, the first of the baseline; or one experiment (its YAML file or folder).
        out: a folder, made if it is missing.
        allow_unequal: also compare runs that differ in data, order, tokenizer or budget.

    Returns:
        Every number of the report, and under "files" where the parts lie.

    Raises:
        DataError: `out` cannot be written, a folder is not a run, one of its files is damaged, or
            no two runs may be compared.
    """
    files = {"html": out / "report.html", "json": out / "report.json"}
    for file in (*files.values(), out / "plots" / "curves.svg"):
        check_writable_file(file)
    report = compare(runs, allow_unequal)
    pictures = draw_figures(report)
    out.mkdir(parents=True, exist_ok=True)
    plots = [file for one in pictures.values() for file in one.save(out / "plots")]
    tables = csv_files(report)
    for name, text in tables.items():
        write_atomic(out / name, text.encode())
    report["files"] = {kind: str(file) for kind, file in files.items()} | {
        "csv": [str(out / name) for name in tables],
        "plots": [str(file) for file in plots],
    }
    write_atomic(files["html"], report_page(report, pictures).encode())
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(files["json"], text.encode())
    return report


def report_text(report: dict[str, Any]) -> str:
    """The report's tables and verdict as text."""
    return terminal_table(report)
