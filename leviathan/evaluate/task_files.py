"""Finds the files of lm-eval tasks in a directory by task and split."""

import re
from collections.abc import Sequence
from pathlib import Path

from leviathan.data.prepare.sources import list_local
from leviathan.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet")
SPLIT_WORDS = {"validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(-[0-9a-f]+)?$")
_NAMED = 8  # files listed in a message


def find_task_files(folder: Path, task: str, split: str) -> list[Path]:
    """Returns the file of one split of a task, or all its shards in order.

    A file counts if its path inside `folder` names both, as `arc_easy_test.jsonl`,
    `ARC-Easy/test-00000-of-00001.parquet` and `hellaswag_validation.sample.jsonl` do; if
    the directory itself is named after the task, the name of the split is sufficient.

    Raises:
        DataError: no file or several candidates were found, or a shard is missing.
    """
    if not folder.is_dir():
        raise DataError(
            "tasks.not_found",
            f"{folder}: directory not found; --task-data must be the directory of the files of "
            f"{task}",
        )
    listing = list_local(folder)
    assert listing is not None
    there = sorted(path for path in listing.files if path.suffix in SUFFIXES)
    name = _plain(task.removesuffix("_openai"))
    found = [path for path in there if _named(path.relative_to(folder), name, split)]
    if not found and name in _plain(folder.resolve().name):
        found = [path for path in there if _named(path.relative_to(folder), "", split)]
    if not found:
        raise DataError(
            "tasks.not_found",
            f"{folder}: no file for the {split} split of {task}; looked for {', '.join(SUFFIXES)} "
            f"with {name!r} and {split!r} in the path, found {_list(there, folder)}",
        )
    groups = {_SHARD.sub("", str(path.with_suffix(""))) + path.suffix for path in found}
    if len(groups) > 1:
        raise DataError(
            "tasks.ambiguous",
            f"{folder}: several files match the {split} split of {task}: "
            f"{_list(found, folder)}; keep only one of them",
        )
    shards = [_SHARD.search(path.stem) for path in found]
    expected = int(shards[0][2]) if shards[0] else 1
    if len(found) != expected:
        raise DataError(
            "tasks.incomplete",
            f"{folder}: the {split} split of {task} has {len(found)} of its {expected} shards: "
            f"{_list(found, folder)}. Download the missing shards",
        )
    return found


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower())


def _named(path: Path, name: str, split: str) -> bool:
    plain = _plain(str(path))
    return name in plain and not set(SPLIT_WORDS[split]).isdisjoint(plain.split("_"))


def _list(files: Sequence[Path], folder: Path) -> str:
    if not files:
        return "no file with these suffixes"
    names = ", ".join(str(path.relative_to(folder)) for path in files[:_NAMED])
    return names + (f" and {len(files) - _NAMED} more" if len(files) > _NAMED else "")
