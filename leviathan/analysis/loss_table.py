"""Tables of losses for scaling fits: reads them and checks that their columns agree."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from leviathan.analysis.scaling import Points
from leviathan.config.suggest import nearest
from leviathan.errors import DataError

NEEDED = ("parameters", "tokens", "loss")
OPTIONAL = ("kind", "study", "perplexity", "perplexity_change", "loss_gain")
ALL_ROWS = "all rows"  # kind of the rows of a table without this column


@dataclass(frozen=True)
class Cell:
    """A printed number: its value, and half a unit of its last digit."""

    value: float
    rounding: float

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """Parses a number with the precision with which it was printed.

        Raises:
            ValueError: the text is not a finite number.
        """
        text = text.strip().replace("_", "")
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text!r} is not finite")
        digits = text.lower().partition("e")[0].partition(".")[2]
        # More than six digits are the output of a program, not a rounded figure of a paper.
        return cls(value, 0.5 * 10.0 ** -len(digits) if digits and len(digits) <= 6 else 0.0)


@dataclass(frozen=True)
class LossRow:
    """One trained model: kind, study, line of the file, and its numbers by column."""

    kind: str
    study: str
    line: int
    cells: dict[str, Cell] = field(default_factory=dict)

    def value(self, column: str) -> float:
        """The value of a required column."""
        return self.cells[column].value


def read_loss_table(path: Path) -> list[LossRow]:
    """Reads a CSV table with the columns `parameters`, `tokens`, `loss` and optionally `kind`.

    Lines that begin with # are comments; other columns are ignored.

    Raises:
        DataError: the file does not exist, columns are missing, or values are not positive numbers;
            all problems are reported at once, each with its line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError("fit.table_not_found", f"{path}: table not found") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("fit.table_unreadable", f"{path}: cannot be read: {error}") from None
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise DataError(
            "fit.table_empty",
            f"{path}: the table is empty; expected a header with {', '.join(NEEDED)}",
        )
    reader = csv.reader(io.StringIO("\n".join(line for _, line in lines)))
    header, *body = ([cell.strip() for cell in row] for row in reader)
    _check_header(path, header)
    rows, faults = [], []
    for (number, _), cells in zip(lines[1:], body, strict=False):
        if len(cells) != len(header):
            faults.append(f"{path}:{number}: {len(cells)} cells under {len(header)} columns")
            continue
        row, wrong = _row(dict(zip(header, cells, strict=True)), number)
        rows.append(row)
        faults += [f"{path}:{number}: {fault}" for fault in wrong]
    if faults:
        raise DataError("fit.table_invalid", "\n".join(faults))
    if not rows:
        raise DataError("fit.no_rows", f"{path}: the table has a header but no rows")
    return rows


def points_of(rows: Sequence[LossRow]) -> Points:
    """The rows as arrays."""
    columns = {name: np.array([row.value(name) for row in rows]) for name in NEEDED}
    rounding = np.array([row.cells["loss"].rounding for row in rows])
    return Points(columns["parameters"], columns["tokens"], columns["loss"], rounding)


def contradictions(rows: Sequence[LossRow], baseline: str) -> list[dict[str, object]]:
    """Finds printed columns that contradict each other for any unrounded values."""
    found = []
    for row in rows:
        found += _perplexity_against_loss(row)
        base = _base_of(row, rows, baseline)
        if base is not None and base is not row:
            found += _stated_change(row, base)
    return found


def _perplexity_against_loss(row: LossRow) -> Iterable[dict[str, object]]:
    loss, perplexity = row.cells["loss"], row.cells.get("perplexity")
    if perplexity is None:
        return
    low, high = (math.exp(loss.value + sign * loss.rounding) for sign in (-1, 1))
    if (
        perplexity.value + perplexity.rounding < low
        or perplexity.value - perplexity.rounding > high
    ):
        yield _finding(
            row,
            f"loss {loss.value:g} and perplexity {perplexity.value:g}: exp {loss.value:g} is "
            f"{math.exp(loss.value):.2f}, ln {perplexity.value:g} is "
            f"{math.log(perplexity.value):.4f}",
        )


def _stated_change(row: LossRow, base: LossRow) -> Iterable[dict[str, object]]:
    """Compares printed relative figures with those that follow from the printed absolute ones."""
    loss, base_loss = row.cells["loss"], base.cells["loss"]
    change, gain = row.cells.get("perplexity_change"), row.cells.get("loss_gain")
    if change is not None:
        nats = loss.value - base_loss.value
        reach = loss.rounding + base_loss.rounding
        ends = [100 * math.expm1(nats + sign * reach) for sign in (-1, 1)]
        yield from _outside(row, "perplexity", change, ends, f"{abs(nats):.3f} nats of the losses")
        printed = row.cells.get("perplexity"), base.cells.get("perplexity")
        if printed[0] is not None and printed[1] is not None:
            ends = [
                100
                * (
                    (printed[0].value + sign * printed[0].rounding)
                    / (printed[1].value - sign * printed[1].rounding)
                    - 1
                )
                for sign in (-1, 1)
            ]
            what = f"perplexities {printed[0].value:g} and {printed[1].value:g}"
            yield from _outside(row, "perplexity", change, ends, what)
    if gain is not None:
        ends = [
            100
            * (
                1
                - (loss.value + sign * loss.rounding)
                / (base_loss.value - sign * base_loss.rounding)
            )
            for sign in (1, -1)
        ]
        what = f"losses {loss.value:g} and {base_loss.value:g}"
        yield from _outside(row, "loss gain", gain, ends, what)


def _outside(
    row: LossRow, name: str, stated: Cell, ends: Sequence[float], what: str
) -> Iterable[dict[str, object]]:
    if stated.value + stated.rounding < ends[0] or stated.value - stated.rounding > ends[1]:
        middle = sum(ends) / 2
        yield _finding(
            row, f"{name} {stated.value:+.3g} % is printed; the {what} give {middle:+.2f} %"
        )


def _finding(row: LossRow, text: str) -> dict[str, object]:
    return {
        "line": row.line,
        "kind": row.kind,
        "parameters": row.value("parameters"),
        "finding": text,
    }


def _base_of(row: LossRow, rows: Sequence[LossRow], baseline: str) -> LossRow | None:
    """The row of the baseline with the same number of tokens that is nearest in size."""
    same = [r for r in rows if r.kind == baseline and r.value("tokens") == row.value("tokens")]
    size = math.log(row.value("parameters"))
    return min(same, key=lambda base: abs(math.log(base.value("parameters")) - size), default=None)


def _check_header(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in NEEDED if name not in header]
    if missing:
        hints = []
        for name in missing:
            near = nearest(name, header, cutoff=0.5)
            hints.append(f"{name} (is {near!r} it?)" if near else name)
        raise DataError(
            "fit.missing_columns",
            f"{path}: missing columns: {', '.join(hints)}; found {', '.join(header) or 'none'}. "
            f"Required: {', '.join(NEEDED)}; to compare kinds, also kind",
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError("fit.duplicate_columns", f"{path}: duplicate columns: {', '.join(twice)}")


def _row(cells: dict[str, str], line: int) -> tuple[LossRow, list[str]]:
    numbers: dict[str, Cell] = {}
    faults = []
    for name in (*NEEDED, *OPTIONAL[2:]):
        text = cells.get(name, "")
        if not text.strip():
            if name in NEEDED:
                faults.append(f"{name} is empty; expected a positive number")
            continue
        try:
            numbers[name] = Cell.parse(text)
        except ValueError:
            faults.append(f"{name}: found {text!r}, expected a number")
            continue
        if numbers[name].value <= 0 and name not in ("perplexity_change", "loss_gain"):
            faults.append(f"{name}: found {text}, expected a positive number")
    return LossRow(cells.get("kind") or ALL_ROWS, cells.get("study", ""), line, numbers), faults
