"""Plots: drawn from odd data without failing, smoothing that keeps the mean, files of their own."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.analysis import plots


def curve(label: str, losses: list[Any], **changes: Any) -> dict[str, Any]:
    points = {"step": list(range(1, len(losses) + 1)), "train_loss": losses}
    none: dict[str, Any] = {"validation_step": [], "validation_loss": []}
    return {"label": label, "tokens_per_step": 100} | points | none | changes


def test_smoothing_of_a_line_is_the_line() -> None:
    line = np.linspace(3, 1, 40)
    np.testing.assert_allclose(plots.smoothed(line, 7), line)


def test_smoothing_is_a_centred_mean() -> None:
    values = np.array([1.0, 5.0, 3.0, 9.0])
    np.testing.assert_allclose(plots.smoothed(values, 3), [1, 3, 17 / 3, 9])


def test_odd_curves_draw() -> None:
    one_point = curve("one", [4.0])
    gaps = curve("gaps", [5.0, None, 4.0, float("nan")], validation_step=[4], validation_loss=[3.5])
    for narrow in (False, True):
        svg = plots.loss_curves([one_point, gaps], paired=True, narrow=narrow)
        assert ">one<" in svg
        assert ">gaps<" in svg
        assert "nan" not in svg


def test_all_colours_follow_the_page() -> None:
    svg = plots.loss_curves([curve("a", [3.0, 2.0]), curve("b", [3.0, 1.9])], paired=True)
    assert "var(--series-1" in svg
    outside = svg
    for colour, name in plots.VARIABLES.items():
        outside = outside.replace(f"var({name}, {colour})", "")
    assert "#" not in outside.replace("var(--paper, #ffffff)", "").replace('"#', "").replace(
        "(#", ""
    )


def test_saved_files_are_whole_svg(tmp_path: Path) -> None:
    rows = [{"bucket": "1–9", "tokens": 5, "documents": 2, "nats_per_token": 7.0}]
    difference = [{"bucket": "1–9", "difference": -0.1, "low": None, "high": None}]
    strata = {
        "runs": [{"label": name, "absolute": rows, "relative": rows} for name in ("a", "b")],
        "pairs": [{"label": "b", "base": "a", "absolute": difference, "relative": difference}],
    }
    files = plots.save_frequency(strata, tmp_path)
    assert [file.name for file in files] == ["frequency_absolute.svg", "frequency_relative.svg"]
    for file in files:
        assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in file.read_text()
