"""Plots: drawn from odd data without failing, smoothing that keeps the mean, files of their own."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leviathan.report import figures as plots
from leviathan.report.curves import band, difference, smoothed, tokens_to
from leviathan.report.figures import VARIABLES


def curve(label: str, losses: list[Any], base: list[Any] | None = None) -> dict[str, Any]:
    at = np.arange(1, len(losses) + 1) * 100.0
    own = (at, np.array(losses, dtype=float))
    gap = [difference(own, (at, np.array(base, dtype=float)))] if base else []
    none = band([(np.array([]), np.array([]))])
    found = {"label": label, "seeds": 1, "train": band([own]), "validation": none}
    return found | {"difference": band(gap) if gap else None}


def test_smoothing_of_a_line_is_the_line() -> None:
    line = np.linspace(3, 1, 40)
    np.testing.assert_allclose(smoothed(line, 7), line)


def test_smoothing_is_a_centered_mean() -> None:
    values = np.array([1.0, 5.0, 3.0, 9.0])
    np.testing.assert_allclose(smoothed(values, 3), [1, 3, 17 / 3, 9])


def test_a_band_is_over_what_all_curves_have() -> None:
    first = (np.array([1, 2, 3]), np.array([5.0, np.nan, 3.0]))
    second = (np.array([1, 3, 4]), np.array([7.0, 2.0, 1.0]))
    found = band([first, second])
    assert found == {"at": [1, 3], "mean": [6, 2.5], "low": [5, 2], "high": [7, 3]}


def test_tokens_to_a_loss_are_interpolated_in_log_tokens() -> None:
    line = np.array([[100.0, 4.0], [400.0, 3.0], [1600.0, 2.0]])
    assert tokens_to(line, 3.5) == pytest.approx(200)
    assert tokens_to(line, 2.0) == pytest.approx(1600)
    assert tokens_to(line, 5.0) == 100
    assert tokens_to(line, 1.9) is None


def test_odd_curves_draw() -> None:
    one_point = curve("one", [4.0])
    gaps = curve("gaps", [5.0, None, 4.0, float("nan")])
    drawn = plots.loss_curves([one_point, gaps])
    for svg in (drawn.wide, drawn.narrow):
        assert ">one<" in svg
        assert ">gaps<" in svg
        assert "nan" not in svg


def test_all_colors_follow_the_page() -> None:
    drawn = plots.loss_curves([curve("a", [3.0, 2.0]), curve("b", [3.0, 1.9], base=[3.0, 2.0])])
    assert "var(--series-1" in drawn.wide
    outside = drawn.wide
    for color, name in VARIABLES.items():
        outside = outside.replace(f"var({name}, {color})", "")
    assert "#" not in outside.replace("var(--paper, #ffffff)", "").replace('"#', "").replace(
        "(#", ""
    )


def test_saved_files_are_whole_svg(tmp_path: Path) -> None:
    rows = [{"bucket": "1–9", "tokens": 5, "documents": 2, "nats_per_token": 7.0}]
    difference = [{"bucket": "1–9", "difference": -0.1, "low": None, "high": None}]
    buckets = {
        "runs": [{"label": name, "absolute": rows, "relative": rows} for name in ("a", "b")],
        "pairs": [{"label": "b", "base": "a", "absolute": difference, "relative": difference}],
    }
    files = plots.save_frequency(buckets, tmp_path)
    names = [f"frequency_{s}.{e}" for s in ("absolute", "relative") for e in ("svg", "png")]
    assert [file.name for file in files] == names
    for file in files[::2]:
        assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in file.read_text()
