"""Checks the files of this project's multiple-choice tasks before lm-eval reads them.

lm-eval uses the name of a missing column as text and counts a missing answer as wrong, so invalid
files would give a score without an error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from leviathan.errors import DataError


def check_task_files(definition: str) -> None:
    """Reads every file that a task's YAML names under `data_files`.

    Args:
        definition: the task's YAML, `${task_data}` filled in.

    Raises:
        DataError: a file is missing, empty, or has a line that is not an item of the task.
    """
    try:
        task = yaml.safe_load(definition)
        files = list(task["dataset_kwargs"]["data_files"].values())
    except (yaml.YAMLError, LookupError, TypeError, AttributeError):
        return  # not a task with local files: lm-eval checks it
    columns = {kind: task.get(f"doc_to_{kind}") for kind in ("text", "choice", "target")}
    plain = all(isinstance(name, str) and name.isidentifier() for name in columns.values())
    for file in files:
        if not Path(file).is_file():
            raise DataError(
                "tasks.not_found",
                f"{file}: file not found; --task-data must be the directory of the files of "
                f"{task['task']}",
            )
        if plain and task.get("output_type") == "multiple_choice":
            _check_items(Path(file), columns)


def _check_items(file: Path, columns: Mapping[str, str]) -> None:
    items = 0
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        items += 1
        try:
            item = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise DataError(
                "tasks.invalid_record", f"{file}:{number}: not JSON ({error})"
            ) from None
        if problem := _problem(item, columns):
            raise DataError("tasks.invalid_record", f"{file}:{number}: {problem}")
    if not items:
        raise DataError("tasks.empty", f"{file}: contains no items")


def _problem(item: Any, columns: Mapping[str, str]) -> str | None:
    """Returns why a line is not an item of the task, or None."""
    text, choice, target = columns["text"], columns["choice"], columns["target"]
    if not isinstance(item, dict) or not {text, choice, target} <= item.keys():
        columns_ = ", ".join(map(str, item)) if isinstance(item, dict) else type(item).__name__
        return f"expected the columns {text}, {choice} and {target}, found {columns_ or 'none'}"
    choices, answer = item[choice], item[target]
    if not isinstance(item[text], str):
        return f"{text}: expected a string, found {item[text]!r:.60}"
    texts = isinstance(choices, list) and all(isinstance(part, str) and part for part in choices)
    if not texts or len(choices) < 2:
        return f"{choice}: expected a list of two or more strings, found {choices!r:.60}"
    if type(answer) is not int or not 0 <= answer < len(choices):
        return f"{target}: expected 0 to {len(choices) - 1}, found {answer!r:.60}"
    return None
