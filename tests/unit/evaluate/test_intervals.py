"""When an interval may be shown, and that those over seeds and documents are right."""

import numpy as np
import pytest
from scipy import stats

from leviathan.evaluate.harness.model import results_table
from leviathan.evaluate.intervals import (
    Interval,
    _freedom,
    comparisons_note,
    no_interval,
    no_standard_error,
    over_documents,
    over_seeds,
)


@pytest.mark.parametrize(
    ("unit", "observations", "parameters", "reason"),
    [
        ("row", 5, 3, "5 rows; 6 needed"),
        ("row", 6, 3, None),
        ("seed", 1, 1, "1 seed; 4 needed"),
        ("seed", 3, 1, "3 seeds; 4 needed"),
        ("seed", 4, 1, None),
        ("document", 2, 0, "2 documents; 10 needed"),
        ("document", 10, 0, None),
        ("sample", 9, 0, "9 samples; 10 needed"),
    ],
)
def test_the_rule(unit, observations, parameters, reason) -> None:
    assert no_interval(unit, observations, parameters) == reason


def test_observations_that_agree_exactly_say_nothing_of_their_noise() -> None:
    assert no_interval("seed", 9, 1, spread=0.0) == (
        "all 9 seeds are identical, so their noise is unknown"
    )
    assert over_documents(np.full(20, 3.0), np.full(20, 6.0)).no_interval is not None
    assert over_seeds([0.1] * 5)[0].no_interval is not None
    assert no_standard_error(200, 0.0) is not None  # no correct sample: 0 ± 0 is not certain
    assert no_standard_error(None, 0.01) is None


def test_over_seeds_is_students_interval_from_four_on() -> None:
    gains = [-0.04, -0.07, -0.01, -0.03]
    expected = stats.ttest_1samp(gains, 0)
    found, std, p = over_seeds(gains)
    low, high = expected.confidence_interval()
    assert (found.low, found.high) == pytest.approx((low, high))
    assert std == pytest.approx(np.std(gains, ddof=1))
    assert p == pytest.approx(expected.pvalue)
    found, std, p = over_seeds(gains[:3])
    assert (found.low, found.high, p) == (None, None, None)
    assert found.no_interval == "3 seeds; 4 needed"
    assert std == pytest.approx(np.std(gains[:3], ddof=1))


def test_coverage_over_seeds() -> None:
    random, covered, runs = np.random.default_rng(3), 0, 400
    for _ in range(runs):
        found, _, _ = over_seeds(random.normal(0.3, 1.0, 4).tolist())
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.3 <= found.high
    assert 0.92 * runs <= covered <= 0.98 * runs


def test_degrees_of_freedom_are_those_of_the_quadratic_form() -> None:
    share = np.random.default_rng(1).dirichlet(np.full(12, 0.7))
    centered = np.eye(12) - np.outer(np.ones(12), share)
    form = centered.T @ np.diag((share / (1 - share)) ** 2) @ centered
    expected = np.trace(form) ** 2 / np.trace(form @ form)
    assert _freedom(share) == pytest.approx(max(1.0, expected))
    assert _freedom(np.full(12, 1 / 12)) == pytest.approx(11)


def test_a_verdict_needs_an_interval() -> None:
    assert Interval(0.1, 0.2).excludes_zero is True
    assert Interval(-0.1, 0.2).excludes_zero is False
    assert Interval.none("2 documents; 10 needed").excludes_zero is None


def test_the_number_of_comparisons_is_told() -> None:
    assert comparisons_note(1) == ""
    assert comparisons_note(20).startswith("20 comparisons")
    assert "about 1 of them would have an interval" in comparisons_note(20)


def test_the_table_of_tasks_shows_no_error_of_few_or_equal_samples() -> None:
    def result(samples, error):
        return {
            "results": {"t": {"acc,none": 0.5, "acc_stderr,none": error}},
            "n-samples": {"t": {"effective": samples}},
            "leviathan": {},
        }

    assert "0.0500" in results_table(result(100, 0.05))
    assert "9 samples; 10 needed" in results_table(result(9, 0.05))
    assert "are identical" in results_table(result(100, 0.0))
