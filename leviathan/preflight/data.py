"""The dataset: whole, with the model's vocabulary, and enough for the steps."""

from leviathan.config.schema import RunConfig
from leviathan.data.dataset import Dataset, open_dataset, open_tokenizer
from leviathan.data.foreign import ForeignRows
from leviathan.data.format import DatasetInfo
from leviathan.data.prepare.verify import verify
from leviathan.data.stream import check_fits
from leviathan.errors import DataError
from leviathan.preflight.report import Report

MANY_EPOCHS = 4  # beyond, repeated text is worth less and less (arXiv 2305.16264)


def check_data(report: Report, config: RunConfig, thorough: bool) -> DatasetInfo | None:
    """Looks through the dataset of a run; None where there is none that can be used.

    Args:
        report: gets the rows.
        config: the run.
        thorough: read and hash every byte, not only indices and sizes.
    """
    info = None
    with report.about("dataset"):
        dataset = open_dataset(config.data, config.model.seq_len)
        info = dataset.info
        _check_files(report, config, dataset, thorough)
    if info is None:
        return None
    with report.about("tokenizer"):
        check_fits(info, config.model, config.train.global_batch_size)
        _check_tokenizer(report, config, info)
    with report.about("length"):
        _check_length(report, config, info)
    return info


def _check_files(report: Report, config: RunConfig, dataset: Dataset, thorough: bool) -> None:
    info = dataset.info
    splits = [dataset.rows(name) for name in info.splits]  # checks the shards
    rows = ", ".join(f"{split.rows:,} {name}" for name, split in info.splits.items())
    why = f"{config.data.path}: {rows} rows of {info.seq_len} tokens, {info.fingerprint[:12]}…"
    plain = dataset.cache is None and dataset.format is None
    foreign = [split for split in splits if isinstance(split, ForeignRows)] if thorough else []
    without_hash = sum(split.verify() for split in foreign)
    verified = thorough and dataset.cache is None and not without_hash
    if thorough and plain:
        verify(config.data.path)
    if verified:
        report.say("dataset", "green", f"{why}; every byte as it was written")
    elif thorough and without_hash:
        report.say("dataset", "amber", f"{why}; {without_hash:,} shards have no hash in index.json")
    elif thorough:
        report.say("dataset", "amber", f"{why}; shards of data.remote are compared when fetched")
    else:
        report.say("dataset", "green", f"{why}; sizes agree (--verify-data reads every byte)")
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
            f"{config.data.path}: the tokenizer differs from dataset.json: copy the files again",
        )
    report.say(
        "tokenizer",
        "green",
        f"{info.tokenizer.name}: {tokenizer.vocab_size:,} ids, as the dataset and the model "
        f"have them; padded to {config.model.padded_vocab_size:,}",
    )


def _check_length(report: Report, config: RunConfig, info: DatasetInfo) -> None:
    rows = info.split("train").rows
    epochs = config.train.steps * config.train.global_batch_size / rows
    report.figures["epochs"] = epochs
    why = f"{config.train.steps:,} steps read {epochs:.3g} epochs of {rows:,} rows"
    notes = []
    if epochs > MANY_EPOCHS:
        notes.append(f"more than {MANY_EPOCHS} repeat much: prepare more text, or fewer steps")
    if "val" not in info.splits or not info.split("val").rows:
        notes.append("there is no validation split: nothing is evaluated")
    report.say("length", "amber" if notes else "green", "; ".join([why, *notes]))
