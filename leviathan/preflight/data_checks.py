"""Checks of the dataset: files, tokenizer and number of epochs."""

from leviathan.config.schema import RunConfig
from leviathan.data.dataset import Dataset, open_dataset, open_tokenizer
from leviathan.data.foreign_mds import ForeignShardReader
from leviathan.data.format import DatasetInfo
from leviathan.data.loader import check_fits
from leviathan.data.prepare.verify import verify
from leviathan.errors import DataError
from leviathan.preflight.report import Report

MANY_EPOCHS = 4  # above, repeated text has diminishing value (arXiv 2305.16264)


def check_data(report: Report, config: RunConfig, thorough: bool) -> DatasetInfo | None:
    """Checks the dataset of a run; returns None if it cannot be used.

    Args:
        report: receives the findings.
        config: the run.
        thorough: whether to read and hash every byte, not only indices and sizes.
    """
    info = None
    with report.catching("dataset"):
        dataset = open_dataset(config.data, config.model.seq_len)
        info = dataset.info
        _check_files(report, config, dataset, thorough)
    if info is None:
        return None
    with report.catching("tokenizer"):
        check_fits(info, config.model, config.train.global_batch_size)
        _check_tokenizer(report, config, info)
    with report.catching("length"):
        _check_length(report, config, info)
    return info


def _check_files(report: Report, config: RunConfig, dataset: Dataset, thorough: bool) -> None:
    info = dataset.info
    splits = [dataset.rows(name) for name in info.splits]  # checks the shards
    rows = ", ".join(f"{split.rows:,} {name}" for name, split in info.splits.items())
    why = f"{config.data.path}: {rows} samples of {info.seq_len} tokens, {info.fingerprint[:12]}…"
    plain = dataset.cache is None and dataset.format is None
    foreign = (
        [split for split in splits if isinstance(split, ForeignShardReader)] if thorough else []
    )
    without_hash = sum(split.verify() for split in foreign)
    verified = thorough and dataset.cache is None and not without_hash
    if thorough and plain:
        verify(config.data.path)
    if verified:
        report.add("dataset", "ok", f"{why}; all hashes match")
    elif thorough and without_hash:
        report.add(
            "dataset", "warning", f"{why}; {without_hash:,} shards have no hash in index.json"
        )
    elif thorough:
        report.add(
            "dataset", "warning", f"{why}; shards of data.remote are verified when they are fetched"
        )
    else:
        report.add("dataset", "ok", f"{why}; sizes match (--verify-data also compares hashes)")
    report.figures["data"] = {
        "fingerprint": info.fingerprint,
        "rows": {name: split.rows for name, split in info.splits.items()},
        "vocab_size": info.vocab_size,
        "verified": verified,
    }


def _check_tokenizer(report: Report, config: RunConfig, info: DatasetInfo) -> None:
    tokenizer = open_tokenizer(config.data)
    if config.data.format is None and tokenizer.fingerprint != info.tokenizer.fingerprint:
        raise DataError(
            "tokenizer.mismatch",
            f"{config.data.path}: the tokenizer differs from the one in dataset.json. Copy the "
            "files again.",
        )
    report.add(
        "tokenizer",
        "ok",
        f"{info.tokenizer.name}: {tokenizer.vocab_size:,} ids, same as dataset and model; "
        f"padded to {config.model.padded_vocab_size:,}",
    )


def _check_length(report: Report, config: RunConfig, info: DatasetInfo) -> None:
    rows = info.split("train").rows
    epochs = config.train.steps * config.train.global_batch_size / rows
    report.figures["epochs"] = epochs
    why = f"{config.train.steps:,} steps read {epochs:.3g} epochs of {rows:,} samples"
    notes = []
    if epochs > MANY_EPOCHS:
        notes.append(f"more than {MANY_EPOCHS} epochs: prepare more text, or train fewer steps")
    if "val" not in info.splits or not info.split("val").rows:
        notes.append("no validation split: the validation loss is not computed")
    report.add("length", "warning" if notes else "ok", "; ".join([why, *notes]))
