"""Buckets and the paired bootstrap."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from leviathan.errors import DataError
from leviathan.evaluate.strata import BUCKETS, SCALES, Strata, bucket_of, paired_difference


def strata(nats: np.ndarray, tokens: np.ndarray, identity: str = "val of x") -> Strata:
    """Documents × buckets, the same on both scales."""
    return Strata(
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
    tokens = np.zeros((3, width), dtype=np.int64)
    tokens[:, 1], tokens[0, 2] = [2, 3, 5], 4
    base, other = np.zeros((3, width)), np.zeros((3, width))
    other[:, 1], other[0, 2] = [-1.0, -3.0, 1.0], 2.0
    result = paired_difference(strata(base, tokens), strata(other, tokens))
    rows = result["absolute"]
    assert rows[0] == {"bucket": "0", "difference": None, "low": None, "high": None}
    assert rows[1]["difference"] == pytest.approx(-3 / 10)
    # With three documents every replicate's mean is one of few values between the extremes.
    assert -1 <= rows[1]["low"] < rows[1]["difference"] < rows[1]["high"] <= 0.2
    # One document only: there is nothing to resample, so no interval is pretended.
    assert rows[2]["difference"] == 0.5
    assert rows[2]["low"] is None
    assert result["all"]["difference"] == pytest.approx(-1 / 14)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    width = len(BUCKETS["absolute"])
    covered = 0
    for _ in range(60):
        tokens = np.zeros((80, width), dtype=np.int64)
        tokens[:, 1] = random.integers(5, 50, 80)
        gain = np.zeros((80, width))
        gain[:, 1] = tokens[:, 1] * random.normal(-0.1, 0.4, 80)
        row = paired_difference(strata(np.zeros_like(gain), tokens), strata(gain, tokens))["all"]
        covered += row["low"] <= -0.1 <= row["high"]
    assert covered >= 50  # 57 expected; fewer than 50 has a probability below 1 in 1,000


def test_other_targets_cannot_be_paired() -> None:
    tokens = np.ones((2, len(BUCKETS["absolute"])), dtype=np.int64)
    first = strata(tokens * 1.0, tokens)
    with pytest.raises(DataError, match="different targets"):
        paired_difference(first, strata(tokens * 1.0, tokens, "val of y"))
    with pytest.raises(DataError, match="different targets"):
        paired_difference(first, strata(tokens * 1.0, tokens + 1))


def test_saved_and_read_back(tmp_path: Path) -> None:
    tokens = np.arange(16).reshape(2, 8)
    strata(tokens * 0.5, tokens).save(tmp_path / "a.npz")
    read = Strata.load(tmp_path / "a.npz")
    assert read.identity == "val of x"
    for scale in SCALES:
        np.testing.assert_array_equal(read.nats[scale], tokens * 0.5)
    assert read.nats_per_token() == 0.5
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:200])
    with pytest.raises(DataError, match="run `leviathan frequency` again"):
        Strata.load(tmp_path / "a.npz")
