"""`leviathan report`: one self-contained page and one JSON file for any number of runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leviathan.analysis.compare import compare
from leviathan.analysis.page import page
from leviathan.analysis.table import terminal_table

__all__ = ["build_report", "terminal_table"]


def build_report(runs: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes `report.html` and `report.json` into `out`.

    Args:
        runs: run folders; the first is the baseline.
        out: a folder, made if it is missing.

    Returns:
        Every number of the report, and under "files" where the page and the JSON lie.

    Raises:
        DataError: a folder is not a run, or one of its files is damaged.
    """
    report = compare(runs)
    out.mkdir(parents=True, exist_ok=True)
    files = {"html": out / "report.html", "json": out / "report.json"}
    report["files"] = {kind: str(file) for kind, file in files.items()}
    _write(files["html"], page(report))
    _write(files["json"], json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False))
    return report


def _write(file: Path, text: str) -> None:
    """All or nothing: a reader never meets half a page."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
