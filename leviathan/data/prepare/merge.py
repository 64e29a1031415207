"""`leviathan data merge`: packs what slices of a preparation have left, wherever they ran."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from leviathan.config.schema import PrepConfig
from leviathan.console import say
from leviathan.data.format import WORK_FOLDER, DatasetInfo
from leviathan.data.prepare.checks import check_rejects
from leviathan.data.prepare.pipeline import explain_stop, pack_parts
from leviathan.data.prepare.pool import open_local_pool
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
    """Packs the parts that slices have left in `out`, or in folders of their own.

    Returns:
        `DatasetInfo.summary()` of the finished dataset in `out`.

    Raises:
        DataError: a part is missing, a slice is still at work, or the folders do not belong
            together.
    """
    if is_finished(out):
        info = DatasetInfo.load(out)
        for folder in dict.fromkeys(others):
            if folder.resolve() != out.resolve():
                _check_merged(folder, info, out)
        tidy(out)
        say(f"{out} is complete: {info.splits['train'].rows:,} training rows. Nothing to do.")
        return info.summary()
    begun = [folder for folder in (out, *others) if (folder / WORK_FOLDER).is_dir()]
    if missing := {out, *others} - set(begun) - {out}:
        raise _no_slice(min(missing))
    if not begun:
        raise DataError(
            "merge.no_slices", f"{out} holds no slices: run `leviathan prep … executor=rank` first"
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
        # `out` itself has none where an earlier merge was stopped before it was done.
        tokenizer = load_tokenizer(next(w for w in works if (w / TOKENIZER).is_dir()) / TOKENIZER)
        ledger = stack.enter_context(WorkDir(out, identity, shared=True))
        ledger.record(request)
        pool = stack.enter_context(open_local_pool(workers))
        return pack_parts(config, infos, folders, tokenizer, ledger, pool).summary()


def _no_slice(folder: Path) -> DataError:
    if not folder.exists():
        return DataError(
            "merge.not_found",
            f"{folder} does not exist: name the folders that slices were written to",
        )
    return DataError(
        "merge.no_slices",
        f"{folder} holds no slice: it was not made by `leviathan prep executor=rank`",
    )


def _check_merged(folder: Path, info: DatasetInfo, out: Path) -> None:
    """Refuses a folder whose slices are not those that the finished `out` was made of.

    Raises:
        DataError: there are no slices in it, or those of something else.
    """
    work = folder / WORK_FOLDER
    if not (work / "request.json").is_file():
        raise _no_slice(folder)
    request, identity = read_work_file(work / "request.json"), read_work_file(work / "config.json")
    tokenizer = {"tokenizer_fingerprint": info.tokenizer.fingerprint}
    made_of = [[source.path, source.split] for source in info.sources]
    wanted = [[name, split] for name, split, _ in request["inputs"]]
    fingerprint = {"tokenizer_fingerprint": identity.get("tokenizer_fingerprint")}
    if info.config | tokenizer != request["config"] | fingerprint or made_of != wanted:
        raise DataError(
            "merge.other_config",
            f"{out} is complete, and was made of other files, or with another configuration, than "
            f"the slices in {folder}: merge those into another folder",
        )


def _gather(
    inputs: Sequence[Sequence[Any]], works: Sequence[Path], config: PrepConfig
) -> tuple[list[Path], list[TokenizedFileInfo]]:
    """The folder and description of every input's part, wherever it lies."""
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
                f"the parts {', '.join(map(str, found))} contradict each other or are not of "
                f"{name}: remove them and run their slice again",
            )
        if info.rejected and config.on_error == "fail":
            raise DataError(
                "merge.rejects", f"{found[0]} omits bad lines, but on_error=fail is asked for"
            )
        folders.append(found[0])
        infos.append(info)
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise DataError(
            "merge.incomplete",
            f"{len(missing)} of {len(inputs)} files are not tokenized yet: {names}; run the slices "
            "again that make them, or name the folders that hold them",
        )
    check_rejects(dict(zip(folders, infos, strict=True)), config.max_reject_fraction)
    return folders, infos


def _request_of(works: Sequence[Path]) -> dict[str, Any]:
    """What the slices were asked to make, which must be the same."""
    requests = [read_work_file(work / "request.json") for work in works]
    for work, request in zip(works, requests, strict=True):
        if request != requests[0]:
            raise DataError(
                "merge.other_config",
                f"{work.parent} was made of other files, or with another configuration, than "
                f"{works[0].parent}: give every slice the same",
            )
    return requests[0]
