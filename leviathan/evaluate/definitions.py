"""The tasks that `eval/` defines: their YAML with the user's files filled in and read through."""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from leviathan.errors import ConfigError
from leviathan.evaluate.choice_tasks import check_task_files
from leviathan.evaluate.task_files import find_task_files
from leviathan.evaluate.task_records import RECORDS, check_records

TASKS = Path(__file__).parents[2] / "eval"  # a stage folder of the repository, not of the package
TASK_DATA = "${task_data}"  # stands for --task-data
BUILTIN = "${lm_eval}"  # for lm-eval's own folder of tasks
FILES, FORMAT = "${files}", "${format}"  # for what is found in --task-data, and json or parquet


def defined() -> list[str]:
    """Names of the tasks that `eval/` defines."""
    return sorted(file.stem for file in TASKS.glob("*.yaml"))


def definitions(names: Sequence[str], task_data: Path | None, builtin: Path) -> dict[str, str]:
    """The YAML of those tasks that `eval/` has, complete and with every item of their files read.

    Without `task_data`, those that lm-eval has by the same name are left to it and the network.

    Args:
        names: tasks, of any make.
        task_data: folder with their files.
        builtin: lm-eval's own folder of tasks.

    Raises:
        ConfigError: a task that reads files, and no `task_data`.
        DataError: files are missing or damaged, or hold something else.
    """
    own: dict[str, str] = {}
    for name in names:
        if name not in defined() or (task_data is None and name in RECORDS):
            continue
        if task_data is None:
            raise ConfigError(
                "tasks.no_data",
                f"task {name} reads files: give the folder they lie in with --task-data DIR",
            )
        text = (TASKS / f"{name}.yaml").read_text(encoding="utf-8")
        folder = Path(task_data)
        text = text.replace(TASK_DATA, str(folder.resolve())).replace(BUILTIN, str(builtin))
        if name in RECORDS:
            text = _with_files(text, name, folder)
        else:
            check_task_files(text)
        own[name] = text
    return own


def _with_files(text: str, name: str, folder: Path) -> str:
    (split,) = yaml.safe_load(text)["dataset_kwargs"]["data_files"]
    files = [file.resolve() for file in find_task_files(folder, name, split)]
    check_records(name, files)
    kind = "parquet" if files[0].suffix == ".parquet" else "json"
    return text.replace(FORMAT, kind).replace(FILES, json.dumps([str(file) for file in files]))
