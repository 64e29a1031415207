"""The tasks that `eval/` defines: their YAML with the paths of the user's files, checked."""

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from leviathan.errors import ConfigError
from leviathan.evaluate.choice_tasks import check_task_files
from leviathan.evaluate.task_files import find_task_files
from leviathan.evaluate.task_records import RECORDS, check_records

TASKS = Path(__file__).parents[2] / "eval"  # in the repository, not in the package
TASK_DATA = "${task_data}"  # replaced by --task-data
BUILTIN = "${lm_eval}"  # replaced by the tasks directory of lm-eval
FILES, FORMAT = "${files}", "${format}"  # replaced by the files, and json or parquet


def defined() -> list[str]:
    """Names of the tasks that `eval/` defines."""
    return sorted(file.stem for file in TASKS.glob("*.yaml"))


def definitions(names: Sequence[str], task_data: Path | None, builtin: Path) -> dict[str, str]:
    """Returns the YAML of the tasks that `eval/` defines, after checking every item of their files.

    Without `task_data`, tasks that lm-eval also defines are skipped: lm-eval downloads their data.

    Args:
        names: names of tasks, including those of lm-eval.
        task_data: directory with their files.
        builtin: tasks directory of lm-eval.

    Raises:
        ConfigError: a task reads local files, but `task_data` is None.
        DataError: files are missing, corrupt or invalid.
    """
    own: dict[str, str] = {}
    for name in names:
        if name not in defined() or (task_data is None and name in RECORDS):
            continue
        if task_data is None:
            raise ConfigError(
                "tasks.no_data",
                f"task {name} reads local files: set their directory with --task-data DIR",
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
