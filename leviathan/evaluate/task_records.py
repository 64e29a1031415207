"""Schemas of the items of seven lm-eval tasks.

lm-eval counts an invalid label as a wrong answer and uses the name of a missing column as text, so
invalid files would give a score without an error. Columns are those of the datasets on the Hub that
lm-eval names.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow
import pyarrow.parquet
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leviathan.errors import DataError

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
