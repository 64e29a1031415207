"""The tasks that `eval/` defines: their YAML, with local files that are found and checked.

lm-eval counts an invalid label as a wrong answer and uses the name of a missing column as text, so
invalid files would give a score without an error. Columns are those of the datasets on the Hub that
lm-eval names.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets.config
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leviathan.data.prepare.sources import list_local
from leviathan.errors import ConfigError, DataError

# ---------------------------------------------------------------- multiple-choice tasks


def check_task_files(task: dict[str, Any]) -> None:
    """Reads every file that a task names under `data_files`.

    Args:
        task: content of the task's YAML, with `${task_data}` filled in.

    Raises:
        DataError: a file is missing, empty, or has a line that is not an item of the task.
    """
    try:
        files = list(task["dataset_kwargs"]["data_files"].values())
    except (LookupError, TypeError, AttributeError):
        return  # not a task with local files: lm-eval checks it
    columns: dict[str, Any] = {
        kind: task.get(f"doc_to_{kind}") for kind in ("text", "choice", "target")
    }
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
        if problem := _item_problem(item, columns):
            raise DataError("tasks.invalid_record", f"{file}:{number}: {problem}")
    if not items:
        raise DataError("tasks.empty", f"{file}: contains no items")


def _item_problem(item: Any, columns: Mapping[str, str]) -> str | None:
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


# ---------------------------------------------------------------- files

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


# ---------------------------------------------------------------- items of seven lm-eval tasks

Text = Annotated[str, Field(strict=True)]
Filled = Annotated[str, Field(strict=True, min_length=1)]


class TaskRecord(BaseModel):
    """One item of a task; columns that the task does not read are ignored."""

    model_config = ConfigDict(extra="ignore")


class HellaSwag(TaskRecord):
    """A context and its possible endings; `label` is the index of the correct one, as text."""

    activity_label: Text
    ctx_a: Text
    ctx_b: Text
    endings: Annotated[list[Filled], Field(min_length=2)]
    label: str | int

    @model_validator(mode="after")
    def _answered(self) -> "HellaSwag":
        known = [str(number) for number in range(len(self.endings))]
        if str(self.label) not in known:
            raise ValueError(f"label: expected one of {', '.join(known)}, found {self.label!r}")
        return self


class ArcChoices(BaseModel):
    """The answers of a question and their labels."""

    text: Annotated[list[Filled], Field(min_length=2)]
    label: list[Text]


class Arc(TaskRecord):
    """A question; `answerKey` is one of the choices' labels."""

    question: Filled
    choices: ArcChoices
    answerKey: Text

    @model_validator(mode="after")
    def _answered(self) -> "Arc":
        labels = self.choices.label
        if len(labels) != len(self.choices.text) or self.answerKey not in labels:
            raise ValueError(
                f"answerKey: expected one of the labels of {len(self.choices.text)} choices "
                f"({', '.join(labels)}), found {self.answerKey!r}"
            )
        return self


class Piqa(TaskRecord):
    """A goal and two solutions; `label` is 0 or 1."""

    goal: Text
    sol1: Filled
    sol2: Filled
    label: Literal[0, 1]


class Winogrande(TaskRecord):
    """A sentence with a blank `_` and two options; `answer` is "1" or "2"."""

    sentence: Annotated[str, Field(strict=True, pattern="_")]
    option1: Filled
    option2: Filled
    answer: Literal["1", "2"]


class Lambada(TaskRecord):
    """A passage whose last word is predicted."""

    text: Annotated[str, Field(strict=True, pattern=" [^ ]+$")]


class Wikitext(TaskRecord):
    """A full document."""

    page: Filled


RECORDS: dict[str, type[TaskRecord]] = {
    "hellaswag": HellaSwag,
    "arc_easy": Arc,
    "arc_challenge": Arc,
    "piqa": Piqa,
    "winogrande": Winogrande,
    "lambada_openai": Lambada,
    "wikitext": Wikitext,
}


def check_records(task: str, files: list[Path]) -> int:
    """Reads every row of a task's files; returns their number.

    Raises:
        DataError: a file is corrupt or empty, or a row is not an item of the task.
    """
    row, total = RECORDS[task], 0
    for file in files:
        count = 0
        for place, item in read_items(file):
            count += 1
            try:
                row.model_validate(item)
            except ValidationError as error:
                raise DataError(
                    "tasks.invalid_record", f"{file}:{place}: {_problem(row, error)}"
                ) from None
        if not count:
            raise DataError("tasks.empty", f"{file}: contains no items")
        total += count
    return total


def read_items(file: Path) -> Iterator[tuple[int, Any]]:
    """(line or row number, value) of a jsonl, JSON or parquet file.

    Raises:
        DataError: the file has another format or is corrupt.
    """
    if file.suffix == ".parquet":
        try:
            yield from enumerate(pyarrow.parquet.read_table(file).to_pylist(), 1)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                "tasks.unreadable", f"{file}: not a readable parquet file ({error})"
            ) from None
        return
    content = file.read_bytes()
    if content.lstrip().startswith(b"["):
        yield from enumerate(_parse(file, 1, content), 1)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield number, _parse(file, number, line)


def _parse(file: Path, number: int, text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise DataError("tasks.invalid_record", f"{file}:{number}: not JSON ({error})") from None


def _problem(row: type[TaskRecord], error: ValidationError) -> str:
    """The first problem, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    problem = first["msg"].removeprefix("Value error, ")
    if not where:
        return problem if first["type"] == "value_error" else f"expected an object; {problem}"
    if first["type"] == "missing":
        return f"column {where} is missing; expected {', '.join(row.model_fields)}"
    return f"{where}: {problem[0].lower()}{problem[1:]}, found {first['input']!r:.60}"


# ---------------------------------------------------------------- definitions

TASKS = Path(__file__).parents[3] / "eval"  # in the repository, not in the package
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
        task = yaml.safe_load((TASKS / f"{name}.yaml").read_text(encoding="utf-8"))
        folder = Path(task_data)
        # Values are filled into the parsed task, so that any path is valid. `datasets` reads files
        # as glob patterns.
        values: dict[str, Any] = {TASK_DATA: escape(str(folder.resolve())), BUILTIN: str(builtin)}
        if name in RECORDS:
            (split,) = task["dataset_kwargs"]["data_files"]
            files = [file.resolve() for file in find_task_files(folder, name, split)]
            check_records(name, files)
            values[FILES] = [escape(str(file)) for file in files]
            values[FORMAT] = "parquet" if files[0].suffix == ".parquet" else "json"
        else:
            check_task_files(_filled(task, {TASK_DATA: str(folder.resolve())}))
        own[name] = yaml.safe_dump(_filled(task, values), sort_keys=False, allow_unicode=True)
    return own


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Replaces placeholders in all texts of a tree."""
    if isinstance(value, dict):
        return {key: _filled(inner, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, values) for inner in value]
    if not isinstance(value, str):
        return value
    if value in values:
        return values[value]
    for placeholder, text in values.items():
        value = value.replace(placeholder, text) if isinstance(text, str) else value
    return value


# ---------------------------------------------------------------- offline mode

_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


@contextmanager
def offline() -> Iterator[None]:
    """Makes the Hub libraries refuse all requests; also sets values already read from variables."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict.fromkeys(_VARIABLES, "1"))
    try:
        with (
            _replaced(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
            _replaced(datasets.config, "HF_HUB_OFFLINE", True),
            _replaced(datasets.config, "HF_DATASETS_OFFLINE", True),
        ):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def dataset_cache(folder: Path) -> Iterator[None]:
    """Converts datasets in `folder`, because the user's cache may contain older data."""
    with _replaced(datasets.config, "HF_DATASETS_CACHE", folder):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
