"""CSV cells that a spreadsheet would evaluate are marked as text."""

import csv
import io

import pytest

from leviathan.report.tables import csv_text


@pytest.mark.parametrize("name", ["=1+1", "+cmd", "-x", "@SUM(A1)"])
def test_names_are_not_formulas(name: str) -> None:
    (row,) = csv.DictReader(io.StringIO(csv_text([{"arm": name, "loss": -0.5}])))
    assert row == {"arm": f"'{name}", "loss": "-0.5"}
