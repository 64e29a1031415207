"""Loss by training frequency of the target token, for one or several checkpoints."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from leviathan.console import as_text, progress_bar
from leviathan.data.dataset import Dataset
from leviathan.data.format import COUNTS_FILE
from leviathan.errors import DataError
from leviathan.evaluate.frequency_buckets import (
    BUCKETS,
    SCALES,
    FrequencyBuckets,
    Scale,
    bucket_of,
    comparisons_of,
    paired_difference,
)
from leviathan.evaluate.intervals import comparisons_note
from leviathan.evaluate.scoring import (
    CheckpointDescription,
    LoadedCheckpoint,
    Ranks,
    describe,
    join_ranks,
    load_checkpoint,
    open_data,
    score_split,
    write_json,
)
from leviathan.files import check_writable_file, write_atomic


def frequency(
    checkpoints: Sequence[Path],
    data: Path,
    out: Path | None = None,
    split: str = "val",
    batch_size: int = 8,
) -> dict[str, Any]:
    """Computes the loss on a split by the training frequency of its targets.

    Each run directory gets `frequency.json` and `frequency.npz` (sums by document and bucket, from
    which any two runs can be paired later); `out` gets one `frequency.json` with all runs. Under a
    launcher, the ranks share the batches.

    Args:
        checkpoints: paths accepted by `resolve_checkpoint`; the first is the baseline.
        data: the dataset that the models were trained on: a prepared dataset, or one in the
            `data.format` of the first model's run.
        out: directory for the combined result.
        split: `val` or `train`.
        batch_size: sequences per batch.

    Returns:
        `runs` (label, and per scale one row per bucket) and `pairs` (each other checkpoint minus
        the first, with 95 % intervals over documents, or the reason why there is none).

    Raises:
        CheckpointError: no valid checkpoint was found.
        DataError: the dataset is corrupt, empty, or does not match a model.
    """
    ranks = join_ranks()
    if out is not None:
        ranks.on_rank_zero(lambda: check_writable_file(out / "frequency.json"))
    described = [describe(path, ranks) for path in checkpoints]
    # All datasets are checked before the first model is scored.
    sets = [
        ranks.on_each_rank(lambda found=found: open_data(found, data, split)) for found in described
    ]
    counts = token_counts(described[0], sets[0], ranks)
    results, buckets, labels = [], [], []
    for found, dataset in zip(described, sets, strict=True):
        loaded = load_checkpoint(found, ranks)
        labels.append(_label(loaded, labels))
        buckets.append(_score(loaded, dataset, counts, split, batch_size, labels[-1]))
        results.append({"label": labels[-1], **_tables(buckets[-1]), **loaded.identity})
        _file(loaded, results[-1], buckets[-1])
    pairs = [
        {"label": label, "base": labels[0], **paired_difference(buckets[0], other)}
        for label, other in zip(labels[1:], buckets[1:], strict=True)
    ]
    result = {"runs": results, "pairs": pairs, "data": str(data), "split": split}
    if out is not None and ranks.rank == 0:
        write_json(out / "frequency.json", result)
    return result


def token_counts(found: CheckpointDescription, data: Dataset, ranks: Ranks) -> np.ndarray:
    """Returns the occurrences of every id in the training split, [V] int64.

    A dataset of another converter has no counts. Its samples are counted once, distributed over
    the ranks, and the counts are stored in the run directory.

    Raises:
        DataError: the counts or a sample are corrupt.
    """
    info = data.info
    if data.format is None:
        total = info.split("train").ids
        return ranks.on_each_rank(
            lambda: read_counts(data.path / COUNTS_FILE, info.vocab_size, total)
        )
    results = found.result_dir()
    kept = results and results.parent / f"token_counts-{info.fingerprint[:16]}.npy"
    if kept and ranks.on_rank_zero(kept.is_file):
        return ranks.on_each_rank(lambda: read_counts(kept, info.vocab_size))
    shares = ranks.map(lambda rank: _count(data, rank, ranks.world_size), ranks.all)
    counts = np.sum(shares, axis=0)
    if kept and ranks.rank == 0:
        buffer = io.BytesIO()
        np.save(buffer, counts)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, buffer.getvalue())
    return counts


def _count(data: Dataset, first: int, step: int) -> np.ndarray:
    rows, counts = data.rows("train"), np.zeros(data.info.vocab_size, np.int64)
    with progress_bar("Counting tokens, once", total=len(rows)) as bar:
        for number in range(first, len(rows), step):
            row = rows[number]
            np.add.at(counts, row.tokens[: row.n_valid], 1)
            bar.advance(step)
    return counts


def read_counts(file: Path, vocab_size: int, total: int | None = None) -> np.ndarray:
    """Occurrences of every id in the training split, [V] int64.

    Args:
        file: an `.npy` file.
        vocab_size: V.
        total: number of tokens in the training split, if known.

    Raises:
        DataError: the file is missing, corrupt, or of another vocabulary, or its values are not
            counts with this total.
    """
    try:
        counts = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            "token_counts.unreadable", f"{file}: unreadable ({error}); prepare the dataset again"
        ) from error
    if counts.shape != (vocab_size,):
        raise DataError(
            "token_counts.invalid",
            f"{file}: expected {vocab_size:,} counts, one per token id, found shape "
            f"{counts.shape}; prepare the dataset again",
        )
    if not np.issubdtype(counts.dtype, np.integer):
        raise DataError(
            "token_counts.invalid",
            f"{file}: expected integer counts, found {counts.dtype}; prepare the dataset again",
        )
    if counts.min() < 0:
        worst = int(counts.argmin())
        raise DataError(
            "token_counts.invalid",
            f"{file}: token id {worst} has the count {counts[worst]}, expected 0 or more; prepare "
            "the dataset again",
        )
    counts = counts.astype(np.int64)
    if total is not None and counts.sum() != total:
        raise DataError(
            "token_counts.invalid",
            f"{file}: the counts add up to {counts.sum():,}, but the training split has {total:,} "
            "tokens; prepare the dataset again",
        )
    return counts


def frequency_table(result: dict[str, Any]) -> str:
    """Formats the result as two tables: by occurrences and by share of the training tokens."""
    names: dict[Scale, str] = {
        "absolute": "occurrences in training",
        "relative": "share of training tokens",
    }
    text = as_text(*(_rich_table(result, scale, name) for scale, name in names.items()))
    note = comparisons_note(comparisons_of(result["pairs"]))
    return f"{text}\n{note}" if note else text


def _label(loaded: LoadedCheckpoint, taken: Sequence[str]) -> str:
    kind = loaded.model_config.embedding.kind
    name = kind if kind not in taken else f"{kind} {loaded.name}"
    return name if name not in taken else f"{name} #{len(taken) + 1}"


def _score(
    loaded: LoadedCheckpoint,
    data: Dataset,
    counts: np.ndarray,
    split: str,
    batch_size: int,
    label: str,
) -> FrequencyBuckets:
    buckets = {scale: bucket_of(counts, scale) for scale in SCALES}
    sums = _Sums()
    for scored in score_split(loaded, data, split, batch_size, f"Frequency, {label}"):
        for scale in SCALES:
            sums.add(scale, scored.documents, buckets[scale][scored.targets], scored.nll)
    return sums.buckets(f"{split} of {data.info.fingerprint}")


class _Sums:
    """Running sums of loss and number of targets by (document, bucket)."""

    def __init__(self) -> None:
        self.cells: dict[Scale, dict[int, np.ndarray]] = {scale: {} for scale in SCALES}

    def add(
        self, scale: Scale, documents: np.ndarray, buckets: np.ndarray, nll: np.ndarray
    ) -> None:
        width = len(BUCKETS[scale])
        present, index = np.unique(documents, return_inverse=True)
        cell = index * width + buckets
        nats = np.bincount(cell, nll, len(present) * width).reshape(-1, width)
        tokens = np.bincount(cell, minlength=len(present) * width).reshape(-1, width)
        for row, document in enumerate(present.tolist()):
            pair = np.stack([nats[row], tokens[row]])
            held = self.cells[scale].get(document)
            self.cells[scale][document] = pair if held is None else held + pair

    def buckets(self, identity: str) -> FrequencyBuckets:
        documents = sorted(self.cells[SCALES[0]])
        stacked = {
            scale: np.stack([self.cells[scale][document] for document in documents])
            for scale in SCALES
        }
        return FrequencyBuckets(
            np.array(documents),
            {scale: stacked[scale][:, 0] for scale in SCALES},
            {scale: stacked[scale][:, 1].astype(np.int64) for scale in SCALES},
            identity,
        )


def _tables(buckets: FrequencyBuckets) -> dict[str, Any]:
    return {"nats_per_token": buckets.nats_per_token()} | {
        scale: buckets.table(scale) for scale in SCALES
    }


def _file(loaded: LoadedCheckpoint, result: dict[str, Any], buckets: FrequencyBuckets) -> None:
    directory = loaded.result_dir()
    if directory is not None and loaded.ranks.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        buckets.save(directory / "frequency.npz")
        write_json(directory / "frequency.json", result)


def _rich_table(result: dict[str, Any], scale: Scale, name: str) -> Table:
    table = Table(title=f"Loss by {name}, nats per token", title_justify="left")
    heads = ["targets", *(run["label"] for run in result["runs"])]
    heads += [f"{pair['label']} − {pair['base']} (95 %)" for pair in result["pairs"]]
    table.add_column(name)
    for head in heads:
        table.add_column(head, justify="right")
    for index, row in enumerate(result["runs"][0][scale]):
        if not row["tokens"]:
            continue
        cells = [f"{run[scale][index]['nats_per_token']:.3f}" for run in result["runs"]]
        cells += [_interval(pair[scale][index]) for pair in result["pairs"]]
        table.add_row(row["bucket"], f"{row['tokens']:,}", *cells)
    return table


def _interval(row: dict[str, Any]) -> str:
    text = f"{row['difference']:+.3f}"
    if row["low"] is not None:
        text += f" ({row['low']:+.3f} to {row['high']:+.3f})"
    elif row["no_interval"]:
        return f"{text.replace('-', '−')} (no interval: {row['no_interval']})"
    return text.replace("-", "−")
