"""Loss by training frequency: buckets, sums per document, and paired intervals.

Uses only numpy, so that the report can read the results of an evaluation.
"""

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from leviathan.errors import DataError
from leviathan.evaluate.intervals import CONFIDENCE, Interval, over_documents
from leviathan.files import write_atomic

Scale = Literal["absolute", "relative"]
SCALES: tuple[Scale, ...] = ("absolute", "relative")


@dataclass(frozen=True)
class Bucket:
    """Token ids whose training frequency is in [low, high): occurrences, or a share of them."""

    label: str
    low: float
    high: float


# "The rarest bucket" of the papers is given once in occurrences and twice as a share of the
# corpus, which are different tokens on a large corpus: hence both scales.
BUCKETS: dict[Scale, tuple[Bucket, ...]] = {
    "absolute": (
        Bucket("0", 0, 1),
        Bucket("1–9", 1, 10),
        Bucket("10–99", 10, 100),
        Bucket("100–999", 100, 1_000),
        Bucket("1k–10k", 1_000, 10_000),
        Bucket("10k–100k", 10_000, 100_000),
        Bucket("100k–1M", 100_000, 1_000_000),
        Bucket("over 1M", 1_000_000, np.inf),
    ),
    "relative": (
        Bucket("not seen", 0, 1e-300),
        Bucket("below 1 in 10⁷", 1e-300, 1e-7),
        Bucket("1 in 10⁷ – 10⁶", 1e-7, 1e-6),
        Bucket("1 in 10⁶ – 10⁵", 1e-6, 1e-5),
        Bucket("1 in 10⁵ – 10⁴", 1e-5, 1e-4),
        Bucket("1 in 10⁴ – 10³", 1e-4, 1e-3),
        Bucket("1 in 10³ – 100", 1e-3, 1e-2),
        Bucket("above 1 in 100", 1e-2, np.inf),
    ),
}


def bucket_of(token_counts: np.ndarray, scale: Scale) -> np.ndarray:
    """Returns the bucket of every token id.

    Args:
        token_counts: occurrences in the training split, [V] integers.
        scale: by occurrences, or by the share of all training tokens.

    Returns:
        [V] int64, indices into `BUCKETS[scale]`.
    """
    frequency = token_counts.astype(np.float64)
    if scale == "relative":
        frequency = frequency / max(1.0, frequency.sum())
    edges = [bucket.low for bucket in BUCKETS[scale][1:]]
    return np.digitize(frequency, edges)


@dataclass(frozen=True)
class FrequencyBuckets:
    """Summed loss of one model on one split, by document and bucket.

    Attributes:
        documents: indices of the documents, [N] int64, ascending.
        nats: summed NLL per scale, [N, buckets] float64.
        tokens: scored targets per scale, [N, buckets] int64.
        identity: what was scored (data fingerprint, split): only equal ones can be paired.
    """

    documents: np.ndarray
    nats: dict[Scale, np.ndarray]
    tokens: dict[Scale, np.ndarray]
    identity: str

    def save(self, path: Path) -> None:
        """Writes one `.npz`."""
        arrays = {"documents": self.documents, "identity": np.array(self.identity)}
        for scale in SCALES:
            arrays[f"nats_{scale}"] = self.nats[scale]
            arrays[f"tokens_{scale}"] = self.tokens[scale]
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        write_atomic(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> "FrequencyBuckets":
        """Reads a file written by `save`.

        Raises:
            DataError: the file is corrupt or has another format.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(
                    file["documents"],
                    {scale: file[f"nats_{scale}"] for scale in SCALES},
                    {scale: file[f"tokens_{scale}"] for scale in SCALES},
                    str(file["identity"]),
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                "frequency.unreadable",
                f"{path}: not a readable file of per-document losses ({error}); "
                "run `leviathan frequency` again",
            ) from error

    def table(self, scale: Scale) -> list[dict[str, Any]]:
        """One row per bucket: label, targets, documents and nats per token (None if empty)."""
        rows = []
        for index, bucket in enumerate(BUCKETS[scale]):
            tokens = int(self.tokens[scale][:, index].sum())
            rows.append(
                {
                    "bucket": bucket.label,
                    "tokens": tokens,
                    "documents": int((self.tokens[scale][:, index] > 0).sum()),
                    "nats_per_token": float(self.nats[scale][:, index].sum()) / tokens
                    if tokens
                    else None,
                }
            )
        return rows

    def nats_per_token(self) -> float:
        """Mean loss over all scored targets."""
        return float(self.nats["absolute"].sum() / max(1, self.tokens["absolute"].sum()))


def paired_difference(base: FrequencyBuckets, other: FrequencyBuckets) -> dict[str, Any]:
    """Loss of `other` minus loss of `base` on the same targets, negative where `other` is better.

    The interval uses documents as observations, because the tokens of a document are not
    independent. It shows the variation between documents, not between seeds of the training run.
    With fewer than ten documents there is no interval, and `no_interval` states the reason.

    Returns:
        Per scale one row per bucket, and `all`: `difference`, `low`, `high`, `documents`,
        `no_interval`; and `comparisons`: the number of rows of each scale with an interval.

    Raises:
        DataError: the two were not computed on the same targets.
    """
    if base.identity != other.identity or not _same_targets(base, other):
        raise DataError(
            "frequency.other_targets",
            "the two models were scored on different targets, so no paired difference exists: "
            f"{base.identity} and {other.identity}; score both on one dataset",
        )
    result: dict[str, Any] = {"confidence": CONFIDENCE}
    for scale in SCALES:
        gain, tokens = other.nats[scale] - base.nats[scale], base.tokens[scale]
        result[scale] = [
            {"bucket": bucket.label, **_difference(gain[:, column], tokens[:, column])}
            for column, bucket in enumerate(BUCKETS[scale])
        ]
    difference = other.nats["absolute"] - base.nats["absolute"]
    result["all"] = _difference(difference.sum(1), base.tokens["absolute"].sum(1))
    result["comparisons"] = {
        scale: sum(row["low"] is not None for row in result[scale]) for scale in SCALES
    }
    return result


def comparisons_of(pairs: Sequence[dict[str, Any]]) -> int:
    """Number of intervals in the tables of these paired differences, over both scales."""
    return sum(sum(pair["comparisons"].values()) for pair in pairs)


def _same_targets(base: FrequencyBuckets, other: FrequencyBuckets) -> bool:
    return np.array_equal(base.documents, other.documents) and all(
        np.array_equal(base.tokens[scale], other.tokens[scale]) for scale in SCALES
    )


def _difference(gain: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """Mean of `gain` per token over documents `[N]`, with its interval or the reason for none."""
    count, documents = int(tokens.sum()), int((tokens > 0).sum())
    found = over_documents(gain, tokens) if count else Interval(None, None)
    difference = float(gain.sum() / count) if count else None
    return {"difference": difference, "documents": documents, **found.as_dict()}
