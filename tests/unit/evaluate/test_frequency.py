"""Loss by training frequency: every target counts once; pairs have the same targets."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from errors import raises_error

from leviathan.data.format import DatasetInfo
from leviathan.evaluate.frequency import frequency, frequency_table, read_counts
from leviathan.evaluate.frequency_buckets import SCALES, FrequencyBuckets, paired_difference
from leviathan.evaluate.perplexity import perplexity


@pytest.fixture(scope="module")
def result(runs: dict[str, Path], tiny_dataset: Path) -> dict:
    return frequency([runs["tied"], runs["leviathan"]], tiny_dataset, batch_size=7)


@pytest.mark.parametrize("scale", SCALES)
def test_buckets_sum_to_the_whole(
    result: dict, runs: dict[str, Path], tiny_dataset: Path, scale: str
) -> None:
    for run in result["runs"]:
        whole = perplexity(runs[run["label"]], tiny_dataset)
        rows = [row for row in run[scale] if row["tokens"]]
        assert sum(row["tokens"] for row in rows) == whole["tokens"]
        total = sum(row["tokens"] * row["nats_per_token"] for row in rows)
        assert total / whole["tokens"] == pytest.approx(whole["nats_per_token"], rel=1e-6)
        assert run["nats_per_token"] == pytest.approx(whole["nats_per_token"], rel=1e-6)


def test_pairs_come_from_the_filed_sums(result: dict, runs: dict[str, Path]) -> None:
    files = [next(run.glob("evaluation/*/frequency.npz")) for run in runs.values()]
    tied, leviathan = (FrequencyBuckets.load(file) for file in files)
    again = paired_difference(tied, leviathan)
    assert result["pairs"] == [{"label": "leviathan", "base": "tied", **again}]
    gap = result["runs"][1]["nats_per_token"] - result["runs"][0]["nats_per_token"]
    assert again["all"]["difference"] == pytest.approx(gap)
    documents = len(tied.documents)  # of the tiny split: too few for an interval
    assert again["all"]["low"] is None
    assert again["all"]["no_interval"] == f"{documents} documents; 10 needed"


def test_every_document_is_there(runs: dict[str, Path], result: dict, tiny_dataset: Path) -> None:
    buckets = FrequencyBuckets.load(next(runs["tied"].glob("evaluation/*/frequency.npz")))
    documents = DatasetInfo.load(tiny_dataset).split("val").documents
    np.testing.assert_array_equal(buckets.documents, np.arange(documents))


def test_same_model_has_no_difference(runs: dict[str, Path], tiny_dataset: Path) -> None:
    twin = frequency([runs["tied"], runs["tied"]], tiny_dataset)
    assert [run["label"] for run in twin["runs"]] == ["tied", "tied tied"]
    whole = twin["pairs"][0]["all"]
    assert (whole["difference"], whole["low"], whole["high"]) == (0, None, None)


def test_common_result_and_table(
    result: dict, runs: dict[str, Path], tiny_dataset: Path, tmp_path: Path
) -> None:
    again = frequency([runs["tied"]], tiny_dataset, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "frequency.json").read_text()) == again
    text = frequency_table(result)
    assert "leviathan − tied" in text
    first = next(row for row in result["runs"][0]["absolute"] if row["tokens"])
    assert f"{first['nats_per_token']:.3f}" in text
    assert "documents; 10 needed)" in text
    assert "comparisons" not in text
    row = {"documents": 12, "no_interval": None, "difference": 0.1, "low": 0.05, "high": 0.15}
    pair = result["pairs"][0]
    pair = {**pair, **{scale: [{**one, **row} for one in pair[scale]] for scale in SCALES}}
    pair["comparisons"] = dict.fromkeys(SCALES, len(pair["absolute"]))
    text = frequency_table({**result, "pairs": [pair]})
    assert "+0.100 (+0.050 to +0.150)" in text
    assert "16 comparisons, not corrected for multiple comparisons" in text


def test_counts_of_another_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "token_counts.npy", np.zeros(5, dtype=np.int64))
    with raises_error("token_counts.invalid", 6, 5):
        read_counts(tmp_path / "token_counts.npy", 6)
    (tmp_path / "token_counts.npy").write_bytes(b"no array")
    with raises_error("token_counts.unreadable", "token_counts.npy"):
        read_counts(tmp_path / "token_counts.npy", 5)


def test_everything_is_refused_before_anything_is_scored(
    make_run: Callable[..., Path], tiny_dataset: Path, tmp_path: Path
) -> None:
    run = make_run(tiny_dataset)
    with raises_error("checkpoint.not_found", "nowhere"):
        frequency([run, tmp_path / "nowhere"], tiny_dataset)
    (tmp_path / "file").write_text("")
    with raises_error("output.not_writable", tmp_path / "file"):
        frequency([run], tiny_dataset, tmp_path / "file")
    assert not (run / "evaluation").exists()
    (run / "evaluation").write_text("")
    with raises_error("output.not_writable", run / "evaluation"):
        perplexity(run, tiny_dataset)


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        (np.array([1, -1, 3]), ("token_counts.invalid",)),
        (np.array([1.0, np.nan, 3.0]), ("token_counts.invalid", "float64")),
        (np.array([1.0, np.inf, 3.0]), ("token_counts.invalid", "float64")),
        (np.array([1.5, 1.5, 3.0]), ("token_counts.invalid", "float64")),
        (np.array([True, False, True]), ("token_counts.invalid",)),
        (np.array([1, 2, 4]), ("token_counts.invalid",)),
        (np.array([1, 2, 3, 0]), ("token_counts.invalid",)),
    ],
)
def test_what_are_no_counts_is_refused(tmp_path: Path, counts: np.ndarray, named: str) -> None:
    path = tmp_path / "token_counts.npy"
    np.save(path, counts)
    with raises_error(*named):
        read_counts(path, 3, 6)
    np.save(path, np.array([1, 2, 3], np.uint16))
    assert read_counts(path, 3, 6).tolist() == [1, 2, 3]
    assert read_counts(path, 3).sum() == 6
