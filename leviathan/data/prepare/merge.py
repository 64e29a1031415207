"""`leviathan data merge`: packs the tokenized files of all slices of a preparation."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from leviathan.config.data import PrepConfig
from leviathan.console import say
from leviathan.data.format import WORK_FOLDER, DatasetInfo
from leviathan.data.prepare.checks import check_rejects
from leviathan.data.prepare.executors import open_local_pool
from leviathan.data.prepare.pipeline import explain_stop, pack_parts
from leviathan.data.prepare.tokenize import TokenizedFileInfo
from leviathan.data.prepare.workdir import (
    TOKENIZER,
    WorkDir,
    check_same,
    is_finished,
    lock_for_writing,
    read_work_file,
    tidy,
)
from leviathan.data.tokenizer import load_tokenizer
from leviathan.errors import DataError


def merge(out: Path, others: Sequence[Path], workers: int = 1) -> dict[str, Any]:
    """Packs the files that slices have tokenized, in `out` or in separate directories.

    Returns:
        `DatasetInfo.summary()` of the finished dataset in `out`.

    Raises:
        DataError: a file is not tokenized, a slice is still running, or the directories belong to
            different preparations.
    """
    if is_finished(out):
        info = DatasetInfo.load(out)
        for folder in dict.fromkeys(others):
            if folder.resolve() != out.resolve():
                _check_merged(folder, info, out)
        tidy(out)
        say(f"{out} is complete: {info.splits['train'].rows:,} training samples. Nothing to do.")
        return info.summary()
    begun = [folder for folder in (out, *others) if (folder / WORK_FOLDER).is_dir()]
    if missing := {out, *others} - set(begun) - {out}:
        raise _no_slice(min(missing))
    if not begun:
        raise DataError(
            "merge.no_slices",
            f"{out} contains no slices. Run `leviathan prep … executor=rank` first",
        )
    with ExitStack() as stack:
        for folder in dict.fromkeys([out, *begun]):
            stack.enter_context(lock_for_writing(folder))
        stack.enter_context(explain_stop(out))
        works = [folder / WORK_FOLDER for folder in begun]
        identity = read_work_file(works[0] / "config.json")
        request = _request_of(works)
        for work in works:
            check_same(read_work_file(work / "config.json"), identity, work.parent)
        config = PrepConfig.model_validate(
            request["config"] | {"out": out, "workers": workers}, strict=False
        )
        folders, infos = _gather(request["inputs"], works, config)
        # `out` itself has none if an earlier merge was interrupted.
        tokenizer = load_tokenizer(next(w for w in works if (w / TOKENIZER).is_dir()) / TOKENIZER)
        workdir = stack.enter_context(WorkDir(out, identity, shared=True))
        workdir.record(request)
        pool = stack.enter_context(open_local_pool(workers))
        return pack_parts(config, infos, folders, tokenizer, workdir, pool).summary()


def _no_slice(folder: Path) -> DataError:
    if not folder.exists():
        return DataError(
            "merge.not_found",
            f"{folder} does not exist. Give the output directories of the slices",
        )
    return DataError(
        "merge.no_slices",
        f"{folder} contains no slice: it is not the output of `leviathan prep executor=rank`",
    )


def _check_merged(folder: Path, info: DatasetInfo, out: Path) -> None:
    """Checks that the slices in a directory are those of the finished `out`.

    Raises:
        DataError: it contains no slices, or those of another preparation.
    """
    work = folder / WORK_FOLDER
    if not (work / "request.json").is_file():
        raise _no_slice(folder)
    request, identity = read_work_file(work / "request.json"), read_work_file(work / "config.json")
    tokenizer = {"tokenizer_fingerprint": info.tokenizer.fingerprint}
    made_of = [[source.path, source.split] for source in info.sources]
    expected = [[name, split] for name, split, _ in request["inputs"]]
    fingerprint = {"tokenizer_fingerprint": identity.get("tokenizer_fingerprint")}
    if info.config | tokenizer != request["config"] | fingerprint or made_of != expected:
        raise DataError(
            "merge.other_config",
            f"{out} is complete, but its files or configuration differ from those of the slices "
            f"in {folder}. Merge those into another directory",
        )


def _gather(
    inputs: Sequence[Sequence[Any]], works: Sequence[Path], config: PrepConfig
) -> tuple[list[Path], list[TokenizedFileInfo]]:
    """The directory and description of each tokenized input file."""
    folders: list[Path] = []
    infos: list[TokenizedFileInfo] = []
    missing: list[str] = []
    for index, (name, split, _) in enumerate(inputs):
        found = [work / "parts" / f"{index:05}" for work in works]
        found = [folder for folder in found if (folder / "part.json").is_file()]
        described = [TokenizedFileInfo.load(folder) for folder in found]
        if not found:
            missing.append(name)
            continue
        info = described[0]
        if (info.path, info.split) != (name, split) or any(
            (other.content, other.sha256) != (info.content, info.sha256) for other in described
        ):
            raise DataError(
                "merge.conflicting_parts",
                f"the parts {', '.join(map(str, found))} are inconsistent or not of {name}. "
                "Remove them and run their slices again",
            )
        if info.rejected and config.on_error == "fail":
            raise DataError(
                "merge.rejects", f"{found[0]} omits rejected records, but on_error=fail is set"
            )
        folders.append(found[0])
        infos.append(info)
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise DataError(
            "merge.incomplete",
            f"{len(missing)} of {len(inputs)} files are not tokenized yet: {names}. Run their "
            "slices again, or give the directories that contain them",
        )
    check_rejects(dict(zip(folders, infos, strict=True)), config.max_reject_fraction)
    return folders, infos


def _request_of(works: Sequence[Path]) -> dict[str, Any]:
    """The requests of the slices, which must be equal."""
    requests = [read_work_file(work / "request.json") for work in works]
    for work, request in zip(works, requests, strict=True):
        if request != requests[0]:
            raise DataError(
                "merge.other_config",
                f"{work.parent} has other input files or another configuration than "
                f"{works[0].parent}. All slices must have the same",
            )
    return requests[0]
