"""`leviathan report`: one self-contained page and one JSON file for any number of runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leviathan.analysis.compare import compare
from leviathan.analysis.page import page
from leviathan.analysis.table import terminal_table
from leviathan.data.files import check_file, write_atomic

__all__ = ["build_report", "terminal_table"]


def build_report(runs: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes `report.html` and `report.json` into `out`.

    Args:
        runs: run folders; the first is the baseline.
        out: a folder, made if it is missing.

    Returns:
        Every number of the report, and under "files" where the page and the JSON lie.

    Raises:
        DataError: `out` cannot be written, a folder is not a run, or one of its files is damaged.
    """
    files = {"html": out / "report.html", "json": out / "report.json"}
    for file in files.values():
        check_file(file)
    report = compare(runs)
    out.mkdir(parents=True, exist_ok=True)
    report["files"] = {kind: str(file) for kind, file in files.items()}
    write_atomic(files["html"], page(report).encode())
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(files["json"], text.encode())
    return report
