"""Buckets and paired differences over documents."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from errors import raises_error
from scipy import stats

from leviathan.evaluate.frequency_buckets import (
    BUCKETS,
    SCALES,
    FrequencyBuckets,
    bucket_of,
    paired_difference,
)
from leviathan.evaluate.intervals import over_documents


def buckets_of(
    nats: np.ndarray, tokens: np.ndarray, identity: str = "val of x"
) -> FrequencyBuckets:
    """Documents × buckets, the same on both scales."""
    return FrequencyBuckets(
        np.arange(len(nats)),
        dict.fromkeys(SCALES, nats),
        dict.fromkeys(SCALES, tokens),
        identity,
    )


def test_absolute_buckets_are_decades() -> None:
    counts = np.array([0, 1, 9, 10, 99, 100, 999_999, 1_000_000, 5_000_000])
    assert bucket_of(counts, "absolute").tolist() == [0, 1, 1, 2, 2, 3, 6, 7, 7]


def test_relative_buckets_divide_by_the_corpus() -> None:
    # 2,410 occurrences in 24.1B tokens are 1 in 10⁷: the papers' second "rarest bucket".
    counts = np.array([0, 1, 2_409, 2_411, 24_099_990_000])
    assert counts.sum() == pytest.approx(24.1e9, rel=1e-3)
    assert bucket_of(counts, "relative").tolist() == [0, 1, 1, 2, 7]


@pytest.mark.parametrize("scale", SCALES)
def test_every_frequency_has_one_bucket(scale: str) -> None:
    edges = [(bucket.low, bucket.high) for bucket in BUCKETS[scale]]  # pyright: ignore
    assert edges[0][0] == 0
    assert edges[-1][1] == np.inf
    assert all(left[1] == right[0] for left, right in pairwise(edges))


def test_paired_difference_by_hand() -> None:
    width = len(BUCKETS["absolute"])
    tokens = np.zeros((12, width), dtype=np.int64)
    tokens[:, 1], tokens[:3, 2] = 10, [2, 3, 5]
    base, other = np.zeros((12, width)), np.zeros((12, width))
    other[:, 1], other[:3, 2] = np.arange(12) - 6.0, [-1.0, -3.0, 1.0]
    result = paired_difference(buckets_of(base, tokens), buckets_of(other, tokens))
    rows = result["absolute"]
    empty = {"difference": None, "low": None, "high": None, "documents": 0, "no_interval": None}
    assert rows[0] == {"bucket": "0", **empty}
    # Documents of one length: Student's interval of their means.
    means = (np.arange(12) - 6.0) / 10
    expected = stats.ttest_1samp(means, 0).confidence_interval()
    # The jackknife's variance is n / (n - 1) times that of the mean.
    wider = 12 / 11 * (expected.high - expected.low) / np.sqrt(12 / 11)
    assert rows[1]["difference"] == pytest.approx(means.mean())
    assert rows[1]["high"] - rows[1]["low"] == pytest.approx(wider)
    assert rows[1]["documents"] == 12
    assert rows[2]["difference"] == pytest.approx(-3 / 10)
    assert (rows[2]["low"], rows[2]["high"]) == (None, None)
    assert rows[2]["no_interval"] == "3 documents; 10 needed"
    assert result["all"]["difference"] == pytest.approx((means.sum() * 10 - 3) / 130)
    assert result["comparisons"] == {"absolute": 1, "relative": 1}


@pytest.mark.parametrize("documents", [2, 9, 10])
def test_below_ten_documents_there_is_no_interval(documents: int) -> None:
    """Two documents were resampled to an interval that held the truth about half the time."""
    width = len(BUCKETS["absolute"])
    tokens = np.full((documents, width), 7)
    gain = np.random.default_rng(0).normal(size=(documents, width))
    result = paired_difference(buckets_of(gain * 0, tokens), buckets_of(gain, tokens))
    for row in (*result["absolute"], *result["relative"], result["all"]):
        assert (row["low"] is None) == (documents < 10)
        assert (row["no_interval"] is None) == (documents == 10)


@pytest.mark.parametrize(("documents", "heavy"), [(10, False), (10, True), (80, True)])
def test_interval_covers_the_truth_about_as_often_as_it_says(documents: int, heavy: bool) -> None:
    random, covered, runs = np.random.default_rng(5), 0, 300
    for _ in range(runs):
        lengths = np.exp(random.normal(3, 1.5, documents)) if heavy else np.full(documents, 50)
        tokens = np.ceil(lengths)
        found = over_documents(tokens * random.normal(-0.1, 0.4, documents), tokens)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= -0.1 <= found.high
    # 0.95 nominal, standard error 0.013; a few very long documents make it wider, never narrower.
    assert covered >= 0.92 * runs
    assert heavy or covered <= 0.98 * runs


def test_other_targets_cannot_be_paired() -> None:
    tokens = np.ones((2, len(BUCKETS["absolute"])), dtype=np.int64)
    first = buckets_of(tokens * 1.0, tokens)
    with raises_error("frequency.other_targets", "val of x"):
        paired_difference(first, buckets_of(tokens * 1.0, tokens, "val of y"))
    with raises_error("frequency.other_targets", "val of x"):
        paired_difference(first, buckets_of(tokens * 1.0, tokens + 1))


def test_saved_and_read_back(tmp_path: Path) -> None:
    tokens = np.arange(16).reshape(2, 8)
    buckets_of(tokens * 0.5, tokens).save(tmp_path / "a.npz")
    read = FrequencyBuckets.load(tmp_path / "a.npz")
    assert read.identity == "val of x"
    for scale in SCALES:
        np.testing.assert_array_equal(read.nats[scale], tokens * 0.5)
    assert read.nats_per_token() == 0.5
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:200])
    with raises_error("frequency.unreadable", "a.npz", "leviathan frequency"):
        FrequencyBuckets.load(tmp_path / "a.npz")
