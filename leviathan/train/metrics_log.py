"""metrics.jsonl: one JSON object per line, without repeated steps."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leviathan.errors import LeviathanError
from leviathan.files import write_atomic

METRICS = "metrics.jsonl"


def append(path: Path, values: dict[str, Any]) -> None:
    """Adds one object, in which NaN and infinity must already be null (`plain`).

    Raises:
        LeviathanError: the file cannot be written.
    """
    with reported_write_errors(path), path.open("a") as file:
        file.write(json.dumps(values, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """Replaces NaN and infinities by None, as JSON requires."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a log; lines that are not records are skipped."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        values = parse_line(line)
        if values is not None:
            yield values


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None if it is truncated or has no step."""
    try:
        values = json.loads(line)
        int(values["step"])
        values["step"] += 0  # a number, not its spelling
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return values


def logged_losses(path: Path, step: int) -> list[float]:
    """The finite losses logged up to `step`, oldest first."""
    logged = [line for line in read_lines(path) if line["step"] <= step]
    return [float(line["loss"]) for line in logged if isinstance(line.get("loss"), int | float)]


def logged(run_dir: Path, key: str) -> dict[int, float]:
    """Step → value of one key of a run's metrics.jsonl; empty if the file does not exist.

    The trainer may be writing to the file: an incomplete line is skipped.
    """
    return {line["step"]: line[key] for line in read_lines(run_dir / METRICS) if key in line}


def last_step(run_dir: Path) -> int:
    """The last step with a logged loss; 0 before the first."""
    return max(logged(run_dir, "loss"), default=0)


def rewind(path: Path, step: int) -> None:
    """Removes the lines after `step`; for step 0, all lines."""
    if not path.exists():
        return
    with reported_write_errors(path):
        kept = [line for line in read_lines(path) if line["step"] <= step] if step else []
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept).encode())


@contextmanager
def reported_write_errors(path: Path) -> Iterator[None]:
    """Converts an OSError of writing to LeviathanError."""
    try:
        yield
    except OSError as error:
        raise LeviathanError(
            "metrics.not_writable",
            f"{path}: cannot be written ({error}); the checkpoints saved so far stay: make room, "
            "and the same command continues from the newest",
        ) from error
