"""The whole preparation: `prepare(config)`.

Files are tokenised independently (and in parallel) into parts, then packed in order by one
process. So the bytes of the data set follow from the inputs and the configuration alone, and a
killed run continues with the parts that it had finished.
"""

import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.config.schema import PrepConfig
from leviathan.console import progress_bar, say
from leviathan.data.files import write_atomic
from leviathan.data.format import (
    COUNTS_FILE,
    DATASET_FILE,
    FORMAT_VERSION,
    REJECTS_FILE,
    WORK_FOLDER,
    DatasetInfo,
    SourceInfo,
    SplitInfo,
    TokenizerInfo,
    token_dtype,
)
from leviathan.data.mds import read_index
from leviathan.data.prepare.ledger import Ledger, check_same, is_finished, sole_writer
from leviathan.data.prepare.pack import Part, duplicates, pack
from leviathan.data.prepare.pool import tokenise_all
from leviathan.data.prepare.sources import Source, Split, find_splits
from leviathan.data.prepare.tokenise import (
    TRAIN,
    VAL,
    PartInfo,
    Task,
)
from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.errors import DataError

# Keys that do not change which bytes are written.
_FREE_KEYS = {"out", "workers", "on_error", "max_reject_fraction"}


def prepare(config: PrepConfig) -> dict[str, Any]:
    """Makes the data set `config.out`, or continues it, or says that it is complete.

    Returns:
        `DatasetInfo.summary()` of the finished data set.

    Raises:
        DataError: bad input, another configuration's folder, a second writer, a full disk …
            Nothing that could be taken for a finished data set is left behind.
    """
    inputs = find_splits(config)
    if is_finished(config.out):
        return _already_finished(config, inputs)
    tokenizer = load_tokenizer(config.tokenizer)
    identity = _identity(config, tokenizer)
    with sole_writer(config.out):
        if is_finished(config.out):  # another process finished it between the look and the lock
            return _already_finished(config, inputs)
        try:
            with Ledger(config.out, identity) as ledger:
                return _prepare(config, inputs, tokenizer, ledger).summary()
        except OSError as error:
            raise DataError(
                f"preparing {config.out} stopped: {error}. Finished files are kept: repair the "
                "cause and run the same command again."
            ) from error


def _prepare(
    config: PrepConfig, inputs: list[tuple[Source, Split]], tokenizer: Tokenizer, ledger: Ledger
) -> DatasetInfo:
    tokenizer.save(ledger.work / "tokenizer")
    tasks = [
        Task(
            source=source,
            split=split,
            part=ledger.parts / f"{index:05}",
            tokenizer=ledger.work / "tokenizer",
            fraction=config.validation.fraction,
            quarantine=config.on_error == "quarantine",
            threads=max(1, config.workers // len(inputs)),
        )
        for index, (source, split) in enumerate(inputs)
    ]
    infos = tokenise_all(tasks, ledger, config)
    _check_documents(infos, config)

    subsets = sorted({name for info in infos for name in info.subsets})
    number = {name: place for place, name in enumerate(subsets)}
    subset_of = [np.array([number[name] for name in info.subsets], np.uint16) for info in infos]
    keep: Sequence[np.ndarray | None] = [None] * len(tasks)
    dropped = 0
    if config.drop_duplicates:
        kept = duplicates([Part(task.part, subset_of[0]).documents() for task in tasks])
        dropped = sum(int((~mask).sum()) for mask in kept)
        keep = kept
    parts = [
        Part(task.part, of, mask) for task, of, mask in zip(tasks, subset_of, keep, strict=True)
    ]
    splits = _pack_all(parts, tokenizer, config, ledger)
    if infos and any(info.rejected for info in infos):
        rejects = b"".join((task.part / REJECTS_FILE).read_bytes() for task in tasks)
        write_atomic(config.out / REJECTS_FILE, rejects)
    tokenizer.save(config.out)
    info = DatasetInfo(
        format_version=FORMAT_VERSION,
        fingerprint=fingerprint(config.out, tokenizer.fingerprint, config.seq_len, subsets, splits),
        vocab_size=tokenizer.vocab_size,
        seq_len=config.seq_len,
        dtype=token_dtype(tokenizer.vocab_size),
        tokenizer=TokenizerInfo(
            name=tokenizer.name,
            fingerprint=tokenizer.fingerprint,
            end_of_text=tokenizer.end_of_text,
        ),
        subsets=subsets,
        splits=splits,
        documents=sum(split.documents for split in splits.values()),
        empty=sum(info.empty for info in infos),
        duplicates=dropped,
        rejected=sum(info.rejected for info in infos),
        dropped_tail_tokens=0,  # the tail is padded, never dropped
        sources=[_source(info) for info in infos],
        config=_stored_config(config),
    )
    write_atomic(config.out / DATASET_FILE, info.dump())
    ledger.close()
    return info


def fingerprint(
    out: Path,
    tokenizer: str,
    seq_len: int,
    subsets: Sequence[str],
    splits: dict[str, SplitInfo],
) -> str:
    """sha256 over what the data set says: tokenizer, row length, subsets and every shard's hash."""
    shards = {
        name: [shard.raw_data.hashes.sha256 for shard in read_index(out / name)]
        for name in sorted(splits)
    }
    content = [FORMAT_VERSION, tokenizer, seq_len, list(subsets), shards]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# ---------------------------------------------------------------- what goes in


def _stored_config(config: PrepConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"out", "workers"})


def _identity(config: PrepConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What must be equal for a folder's work to be continued."""
    stored = config.model_dump(mode="json", exclude=_FREE_KEYS)
    return stored | {"tokenizer_fingerprint": tokenizer.fingerprint}


def _already_finished(config: PrepConfig, inputs: list[tuple[Source, Split]]) -> dict[str, Any]:
    info = DatasetInfo.load(config.out)
    wanted = config.model_dump(mode="json", exclude=_FREE_KEYS)
    check_same(
        {key: value for key, value in info.config.items() if key not in _FREE_KEYS},
        wanted,
        config.out,
    )
    # A file may have been trained anew under its old name; tiktoken's names stay what they are.
    if Path(config.tokenizer).exists():
        found = load_tokenizer(config.tokenizer).fingerprint
        check_same({"tokenizer": info.tokenizer.fingerprint}, {"tokenizer": found}, config.out)
    if info.rejected and config.on_error == "fail":
        raise DataError(
            f"{config.out} leaves out {info.rejected} bad lines (on_error=quarantine), but "
            "on_error=fail is asked for: choose another out"
        )
    then = [(source.path, source.bytes, source.split) for source in info.sources]
    now = [(source.name, source.size() or 0, split) for source, split in inputs]
    if then != now:
        changed = sorted({item[0] for item in set(then) ^ set(now)})
        raise DataError(
            f"{config.out} is complete, but was made from other files than are there now "
            f"({', '.join(changed[:5])}): choose another out, or remove that folder"
        )
    shutil.rmtree(config.out / WORK_FOLDER, ignore_errors=True)  # of a run killed at its very end
    say(f"{config.out} is complete: {info.splits['train'].rows:,} training rows. Nothing to do.")
    return info.summary()


def _source(info: PartInfo) -> SourceInfo:
    return SourceInfo(
        path=info.path,
        bytes=info.bytes,
        sha256=info.sha256,
        documents=info.documents,
        empty=info.empty,
        rejected=info.rejected,
        split=info.split,
    )


def _check_documents(infos: Sequence[PartInfo], config: PrepConfig) -> None:
    documents = sum(info.documents for info in infos)
    rejected = sum(info.rejected for info in infos)
    if not documents:
        raise DataError(
            f"no documents in {', '.join(config.source.paths)}: "
            f"{sum(info.empty for info in infos)} empty texts, {rejected} bad lines"
        )
    seen: dict[str, str] = {}
    for info in infos:
        if not info.documents:
            say(f"warning: {info.path} holds no documents", style="yellow")
        elif info.content in seen:
            say(
                f"warning: {info.path} holds the same texts as {seen[info.content]}", style="yellow"
            )
        seen.setdefault(info.content, info.path)
    if rejected:
        say(f"warning: {rejected:,} bad lines left out, see {REJECTS_FILE}", style="yellow")


# ---------------------------------------------------------------- pack


def _pack_all(
    parts: list[Part], tokenizer: Tokenizer, config: PrepConfig, ledger: Ledger
) -> dict[str, SplitInfo]:
    if not any(part.wanted(TRAIN).any() for part in parts):
        ledger.close()  # only another configuration helps, and that one cannot continue this work
        raise DataError(
            "no documents are left for training, all of them are held out: hold out fewer "
            "(validation.paths, validation.fraction), or add files to source.paths"
        )
    splits: dict[str, SplitInfo] = {}
    total = sum(int(part.documents()["length"].sum()) for part in parts)
    with progress_bar("packing (tokens)", total=total) as bar:
        for name, split in (("train", TRAIN), ("val", VAL)):
            folder = ledger.work / name
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(config.out / name, ignore_errors=True)
            if not any(part.wanted(split).any() for part in parts):
                continue
            info, counts = pack(parts, split, tokenizer, config.seq_len, folder, bar.advance)
            folder.rename(config.out / name)
            splits[name] = info
            if split == TRAIN:
                _save_counts(config.out / COUNTS_FILE, counts)
    return splits


def _save_counts(path: Path, counts: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, counts)
    write_atomic(path, buffer.getvalue())
