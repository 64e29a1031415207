"""The complete preparation: `prepare(config)`.

Files are tokenized independently and in parallel, then packed into shards, which are independent as
well. The bytes of the dataset therefore depend only on the inputs and the configuration, and an
interrupted run resumes with the finished files.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.config.data import PrepConfig
from leviathan.console import progress_bar, say
from leviathan.credentials import cleaned
from leviathan.data.format import REJECTS_FILE, DatasetInfo, SourceInfo, token_dtype
from leviathan.data.prepare.build import (
    DatasetSpec,
    EmptyTrainingSplit,
    build_dataset,
    epochs,
    split_selections,
)
from leviathan.data.prepare.checks import announce, check_documents, check_rejects, check_validation
from leviathan.data.prepare.executors import Pool, open_local_pool
from leviathan.data.prepare.packing import IdFile, TokenizedFile, deduplicate
from leviathan.data.prepare.readers import record_schema
from leviathan.data.prepare.records import rejected_records
from leviathan.data.prepare.sources import Source, Split, find_splits
from leviathan.data.prepare.tokenize import (
    TokenizedFileInfo,
    TokenizeTask,
    remember_encoder,
    tokenize,
)
from leviathan.data.prepare.workdir import (
    PrepSlice,
    WorkDir,
    check_same,
    is_finished,
    lock_for_slice,
    lock_for_writing,
    read_slice,
    tidy,
)
from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.errors import DataError

# Keys that do not change the bytes of the dataset …
_FREE_KEYS = {"out", "workers", "executor", "backend", "on_error", "max_reject_fraction"}
# … and one that does not change tokenized files, so that correcting it costs no tokenizing.
_PACKING_KEYS = {"mixing"}
_UNSTORED_KEYS = {"out", "workers", "executor", "backend"}

Inputs = list[tuple[Source, Split]]


def prepare(config: PrepConfig) -> dict[str, Any]:
    """Prepares the dataset `config.out`; resumes an interrupted preparation.

    With `executor: rank`, tokenizes only this process's slice of the input files.

    Returns:
        `DatasetInfo.summary()` of the finished dataset; for a slice, its statistics.

    Raises:
        DataError: the input is invalid, `out` belongs to another configuration, another process is
            writing to it, or the disk is full. `dataset.json` is not written then.
    """
    part = read_slice() if config.executor == "rank" else None
    inputs = find_splits(config)
    if is_finished(config.out):
        return _already_finished(config, inputs)
    tokenizer = load_tokenizer(config.tokenizer)
    identity = _identity(config, tokenizer)
    if part is not None:
        with lock_for_slice(config.out, part.rank, part.world), explain_stop(config.out):
            return _prepare_slice(config, inputs, tokenizer, identity, part)
    with lock_for_writing(config.out):
        if is_finished(config.out):  # another process finished it before the lock was acquired
            return _already_finished(config, inputs)
        with (
            explain_stop(config.out),
            WorkDir(config.out, identity) as workdir,
            _open_pool(config) as pool,
        ):
            tasks = _begin(config, inputs, tokenizer, workdir)
            infos = _tokenize_all(list(enumerate(tasks)), inputs, tokenizer, workdir, config, pool)
            folders = [task.part for task in tasks]
            return pack_parts(config, infos, folders, tokenizer, workdir, pool).summary()


def _open_pool(config: PrepConfig) -> AbstractContextManager[Pool]:
    if config.executor == "ray":
        from leviathan.data.prepare.executors import open_ray_pool

        return open_ray_pool()
    return open_local_pool(config.workers)


@contextmanager
def explain_stop(out: Path) -> Iterator[None]:
    """Converts OS errors, such as a full disk, to DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            "prep.stopped",
            f"preparing {out} stopped: {error}. Finished files are kept. Correct the cause and "
            "run the same command to resume.",
        ) from error


# ---------------------------------------------------------------- tokenizing


def _begin(
    config: PrepConfig, inputs: Inputs, tokenizer: Tokenizer, workdir: WorkDir
) -> list[TokenizeTask]:
    """Writes the request of a slice for the merge; returns one task per input."""
    listed = [[source.name, split, source.size()] for source, split in inputs]
    workdir.record({"config": _stored_config(config), "inputs": listed})
    tokenizer.save(workdir.tokenizer)
    return [
        TokenizeTask(
            source=source,
            split=split,
            part=workdir.parts / f"{index:05}",
            tokenizer=workdir.tokenizer,
            fraction=config.validation.fraction,
            quarantine=config.on_error == "quarantine",
            threads=max(1, config.workers // len(inputs)),
            reading=record_schema(source, config),
            include=frozenset(config.source.subsets.include),
            exclude=frozenset(config.source.subsets.exclude),
        )
        for index, (source, split) in enumerate(inputs)
    ]


def _prepare_slice(
    config: PrepConfig,
    inputs: Inputs,
    tokenizer: Tokenizer,
    identity: dict[str, Any],
    part: PrepSlice,
) -> dict[str, Any]:
    with (
        WorkDir(config.out, identity, shared=True) as workdir,
        open_local_pool(config.workers) as pool,
    ):
        tasks = _begin(config, inputs, tokenizer, workdir)
        mine = list(enumerate(tasks))[part.rank :: part.world]
        workdir.mark_slice(part.rank, part.world, done=False)
        infos = _tokenize_all(mine, [], tokenizer, workdir, config, pool)
        workdir.mark_slice(part.rank, part.world, done=True)
    say(
        f"slice {part.rank} of {part.world}: {len(infos)} of {len(tasks)} files are tokenized. "
        f"After the last slice, run `leviathan data merge {config.out} [the other slices' "
        "directories]`"
    )
    return {
        "slice": part.rank,
        "of": part.world,
        "files": len(infos),
        "documents": sum(info.documents for info in infos),
        "rejected": sum(info.rejected for info in infos),
    }


def _tokenize_all(
    tasks: Sequence[tuple[int, TokenizeTask]],
    packed: Inputs,
    tokenizer: Tokenizer,
    workdir: WorkDir,
    config: PrepConfig,
    pool: Pool,
) -> list[TokenizedFileInfo]:
    """Tokenizes the files that are not tokenized yet; prints the required disk space first.

    Returns:
        One description per task, in order.

    Raises:
        DataError: a file is corrupt, a record is rejected with `on_error=fail`, or too many are
            rejected.
    """
    workdir.clear_leftovers([task for _, task in tasks])
    done = {index: info for index, task in tasks if (info := workdir.finished(task))}
    if done:
        say(f"resuming: {len(done)} of {len(tasks)} files were already tokenized")
    sizes = {index: task.source.size() or 0 for index, task in tasks}
    # The largest first, so that no worker starts a long one when the others have finished.
    pending = dict(
        sorted(
            ((index, task) for index, task in tasks if index not in done),
            key=lambda item: -sizes[item[0]],
        )
    )
    announce(
        list(pending.values()),
        [source for source, _ in packed],
        tokenizer,
        config.seq_len,
        max([1.0, *config.mixing.values()]),
        config.out,
    )
    if pending:
        # Created once, warns once, and is inherited by processes that are forked now.
        backend = remember_encoder(tokenizer, config.backend)
        pending = {index: replace(task, backend=backend) for index, task in pending.items()}
    if len(pending) > 1:
        pool.start()
    total, start = sum(sizes.values()) or None, sum(sizes[index] for index in done)
    with progress_bar("tokenizing (bytes)", total=total, start=start) as bar:

        def finish(index: int, info: TokenizedFileInfo) -> None:
            done[index] = info
            bar.advance(0, note=f"{len(done)}/{len(tasks)} files")
            if packed:  # one slice does not know the number of valid lines in the others
                share = sum(sizes[number] for number in done) / max(1, sum(sizes.values()))
                parts = {task.part: done[number] for number, task in tasks if number in done}
                check_rejects(parts, config.max_reject_fraction, share)

        pool.run(tokenize, pending, bar.advance, finish)
    return [done[index] for index, _ in tasks]


# ---------------------------------------------------------------- packing


def pack_parts(
    config: PrepConfig,
    infos: Sequence[TokenizedFileInfo],
    folders: Sequence[Path],
    tokenizer: Tokenizer,
    workdir: WorkDir,
    pool: Pool,
) -> DatasetInfo:
    """Builds the dataset from tokenized files.

    Args:
        config: the configuration.
        infos: description of each tokenized file.
        folders: directory of each tokenized file.
        tokenizer: tokenizer of the ids.
        ledger: work directory of the dataset.
        pool: pool that writes the shards.

    Raises:
        DataError: there are no documents, none for training, or `mixing` names an unknown subset.
    """
    check_documents(infos, config)
    subsets = sorted({name for info in infos for name in info.subsets})
    number = {name: place for place, name in enumerate(subsets)}
    dtype = token_dtype(tokenizer.vocab_size)
    parts = [
        TokenizedFile(
            table=folder / "documents",
            ids=IdFile(folder / "ids", dtype),
            subset_of=np.array([number[name] for name in info.subsets], np.uint16),
        )
        for folder, info in zip(folders, infos, strict=True)
    ]
    weights, dropped = epochs(config.mixing, subsets), 0
    if config.deduplicate:
        parts, dropped = deduplicate(parts, workdir.work)
    recipe = DatasetSpec(
        tokenizer=tokenizer,
        seq_len=config.seq_len,
        subsets=subsets,
        parts=parts,
        made_of=[[info.path, info.content, info.sha256] for info in infos] + [config.mixing],
        choices=split_selections(weights),
        sources=[_source(info) for info in infos],
        config=_stored_config(config),
        duplicates=dropped,
        rejects=b"".join((folder / REJECTS_FILE).read_bytes() for folder in folders),
    )
    try:
        made = build_dataset(recipe, workdir, pool)
    except EmptyTrainingSplit:
        if not config.mixing:
            workdir.close()  # this work can only be resumed with another configuration
        raise
    check_validation(infos, made, config)
    return made


# ---------------------------------------------------------------- what goes in


def _stored_config(config: PrepConfig) -> dict[str, Any]:
    return cleaned(config.model_dump(mode="json", exclude=_UNSTORED_KEYS))


def _identity(config: PrepConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The values that must be equal to resume the work in a directory."""
    stored = cleaned(config.model_dump(mode="json", exclude=_FREE_KEYS | _PACKING_KEYS))
    return stored | {"tokenizer_fingerprint": tokenizer.fingerprint}


def _already_finished(config: PrepConfig, inputs: Inputs) -> dict[str, Any]:
    info = DatasetInfo.load(config.out)
    settings = cleaned(config.model_dump(mode="json", exclude=_FREE_KEYS))
    check_same(
        {key: value for key, value in info.config.items() if key not in _FREE_KEYS},
        settings,
        config.out,
    )
    # A file may have been trained again under its name; names of tiktoken encodings are stable.
    if Path(config.tokenizer).exists():
        found = load_tokenizer(config.tokenizer).fingerprint
        check_same({"tokenizer": info.tokenizer.fingerprint}, {"tokenizer": found}, config.out)
    if info.rejected and config.on_error == "fail":
        raise DataError(
            "prep.rejects",
            f"{config.out} omits {rejected_records(info.rejected)} (on_error=quarantine), but "
            "on_error=fail is set. Choose another out",
        )
    then = [(source.path, source.bytes, source.split) for source in info.sources]
    size_then = {(source.path, source.split): source.bytes for source in info.sources}
    now = [
        (source.name, size_then.get((source.name, split)) if size is None else size, split)
        for source, split in inputs
        for size in [source.size()]
    ]
    if then != now:
        changed = sorted({item[0] for item in set(then) ^ set(now)})
        raise DataError(
            "prep.other_sources",
            f"{config.out} is complete, but was made from other files than exist now "
            f"({', '.join(changed[:5])}). Choose another out, or remove the directory",
        )
    tidy(config.out)
    say(f"{config.out} is complete: {info.splits['train'].rows:,} training samples. Nothing to do.")
    return info.summary()


def _source(info: TokenizedFileInfo) -> SourceInfo:
    return SourceInfo(
        path=info.path,
        bytes=info.bytes,
        sha256=info.sha256,
        documents=info.documents,
        empty=info.empty,
        rejected=info.rejected,
        split=info.split,
        excluded=sum(info.excluded.values()),
        backend_mismatches=info.mismatches,
    )
