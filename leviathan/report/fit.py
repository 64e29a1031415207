"""`leviathan fit`: fits scaling laws to a table of losses and states what the table determines."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from leviathan.config.explain import nearest
from leviathan.console import as_text
from leviathan.errors import DataError
from leviathan.evaluate.intervals import (
    CONFIDENCE,
    MIN_SPARE,
    Interval,
    comparisons_note,
    no_interval,
)
from leviathan.files import check_writable_file, write_atomic
from leviathan.report.figures import scaling_figure
from leviathan.report.scaling_law import (
    FORMS,
    REPLICATES,
    BootstrapFits,
    Form,
    Law,
    Points,
    bootstrap,
    fit,
    free_parameters,
    interval,
    line_of,
    no_fit_interval,
    residual_scatter,
)

# ---------------------------------------------------------------- table

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


# ---------------------------------------------------------------- fit

Names = ("E", "A", "alpha", "B", "beta")
_GREEK = {"alpha": "α", "beta": "β"}
_AXES: dict[str, Literal["n", "d"]] = {"capacity": "n", "data": "d"}


def fit_table(
    path: Path,
    form: Form | Literal["auto"] = "auto",
    baseline: str | None = None,
    floor: bool = True,
    out: Path | None = None,
    replicates: int = REPLICATES,
) -> dict[str, Any]:
    """Fits a scaling law to every kind in a table and compares the kinds with the baseline.

    Args:
        path: a CSV with `parameters`, `tokens`, `loss` and, to compare, `kind`.
        form: variables of the law; `auto` selects those that the table determines.
        baseline: the kind to compare with; default: `tied` if present, else the first.
        floor: False fixes E = 0.
        out: directory for `fit.json`, `fit.svg` and `fit.png`.
        replicates: number of refits from which the intervals are computed.

    Returns:
        Every number; "says" contains the conclusions as sentences.

    Raises:
        DataError: an invalid table, too few rows for the form, or an unknown baseline.
    """
    files = {name: out / f"fit.{name}" for name in ("json", "svg", "png")} if out else {}
    for file in files.values():
        check_writable_file(file)
    rows = read_loss_table(path)
    kinds = list(dict.fromkeys(row.kind for row in rows))
    base = _baseline(path, kinds, baseline)
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in kinds}
    chosen = _form(points_of(by_kind[base]), form)
    need = free_parameters(chosen, floor)
    if len(by_kind[base]) < need:
        raise DataError("fit.too_few_rows", _too_few(path, base, by_kind[base], chosen, need))
    if not _varies(points_of(by_kind[base]), chosen):
        raise DataError(
            "fit.not_identifiable",
            f"{path}: {FORMS[chosen]} cannot be fitted to {base}: all its rows have the same "
            "number of parameters or of tokens; use --form n or --form d",
        )
    fits = {
        kind: _fit_kind(points_of(own), chosen, floor, replicates, seed)
        for seed, (kind, own) in enumerate(by_kind.items())
        if len(own) >= need and _varies(points_of(own), chosen)
    }
    result: dict[str, Any] = {
        "table": str(path),
        "rows": len(rows),
        "form": chosen,
        "formula": FORMS[chosen],
        "baseline": base,
        "confidence": CONFIDENCE,
        "replicates": replicates,
        "fits": {kind: found["figures"] for kind, found in fits.items()},
        "effective": _effective(rows, base, fits, chosen),
        "exponents": _exponents(fits, base),
        "contradictions": contradictions(rows, base),
    }
    result["comparisons"] = _comparisons(result)
    result["says"] = _summary(result, points_of(by_kind[base]), form, floor)
    if out:
        _write(result, rows, fits, files)
    return result


def fit_text(result: dict[str, Any]) -> str:
    """The result as text."""
    table = Table(title=result["formula"], title_justify="left")
    names = [name for name in Names if name in next(iter(result["fits"].values()))["values"]]
    for head in ("kind", "rows", *(_GREEK.get(name, name) for name in names), "misfit"):
        table.add_column(head, justify="left" if head == "kind" else "right")
    for kind, figures in result["fits"].items():
        reason = figures["no_interval"]
        cells = [
            _with_interval(figures["values"][name], figures["intervals"][name], reason)
            for name in names
        ]
        table.add_row(kind, str(figures["rows"]), *cells, f"{100 * figures['misfit']:.2g} %")
    tables = [table]
    if result["effective"]:
        tables.append(_effective_table(result))
    notes = [
        f"No intervals for {kind}: {figures['no_interval']}."
        for kind, figures in result["fits"].items()
        if figures["no_interval"]
    ]
    if note := comparisons_note(result["comparisons"]):
        notes.append(note)
    return "\n".join([as_text(*tables), *notes, *result["says"]])


def _effective_table(result: dict[str, Any]) -> Table:
    base = result["baseline"]
    table = Table(title=f"What {base} would need for the same loss", title_justify="left")
    axes = {"capacity": f"{base} parameters", "data": f"{base} tokens"}
    axes = {axis: head for axis, head in axes.items() if axis in result["effective"][0]}
    heads = [part for head in axes.values() for part in (head, "×")]
    for head in ("kind", "parameters", "tokens", "loss", *heads):
        table.add_column(head, justify="left" if head == "kind" else "right")
    for row in result["effective"]:
        cells = []
        for axis in axes:
            found = row[axis]
            if found["needs"] is None:
                cells += ["never", "∞"]
            else:
                beyond = " *" if found["extrapolated"] else ""
                cells += [f"{found['needs']:.3g}{beyond}"]
                cells += [_with_interval(found["ratio"], found["interval"], found["no_interval"])]
        own = (f"{row['parameters']:,.0f}", f"{row['tokens']:.3g}", f"{row['loss']:.4g}")
        table.add_row(row["kind"], *own, *cells)
    table.caption = "* beyond the sizes that were trained: an extrapolation"
    return table


def _with_interval(value: float, ends: Sequence[float | None], reason: str | None) -> str:
    if reason is not None:
        return f"{value:.3g} (no interval)"
    low, high = ("∞" if end is None else f"{end:.3g}" for end in ends)
    return f"{value:.3g} ({low}–{high})"


def _baseline(path: Path, kinds: Sequence[str], requested: str | None) -> str:
    if requested is not None and requested not in kinds:
        raise DataError(
            "fit.unknown_kind",
            f"{path} contains no kind {requested!r}; its kinds are {', '.join(kinds)}",
        )
    return requested or ("tied" if "tied" in kinds else kinds[0])


def _varies(points: Points, form: Form) -> bool:
    columns = {"n": points.parameters, "d": points.tokens}
    return all(len(set(columns[letter])) > 1 for letter in form)


def _form(points: Points, requested: Form | Literal["auto"]) -> Form:
    """The configured form, or the one whose terms the rows determine."""
    if requested != "auto":
        return requested
    if not _varies(points, "n"):
        return "d"
    if not _varies(points, "d") or line_of(points) is not None:
        return "n"
    return "nd"


def _too_few(path: Path, kind: str, rows: Sequence[LossRow], form: Form, need: int) -> str:
    of_kind = "" if kind == ALL_ROWS else f" of kind {kind!r}"
    text = (
        f"{path}: {len(rows)} row{'s' * (len(rows) != 1)}{of_kind}, but {FORMS[form]} has "
        f"{need} free parameters: provide at least {need} rows, or {need + MIN_SPARE} for intervals"
    )
    return f"{text}; --no-floor fixes E = 0 and needs {need - 1}" if need > 2 else text


def _fit_kind(
    points: Points, form: Form, floor: bool, replicates: int, seed: int
) -> dict[str, Any]:
    law = fit(points, form, floor)
    reason = no_fit_interval(points, law, floor)
    # Rows that the law fits exactly may still be sufficient; only their noise is unknown.
    enough = no_interval("row", len(points), free_parameters(form, floor)) is None
    draws = bootstrap(points, law, floor, replicates, seed) if enough else None
    values = law.named()
    misfit = np.log(points.loss) - np.log(law.loss(points.parameters, points.tokens))
    intervals = {
        name: list(interval([other.named()[name] for other in draws.laws]))
        if draws and reason is None
        else [None, None]
        for name in values
    }
    figures = {
        "rows": len(points),
        "spare": len(points) - free_parameters(form, floor),
        "values": values,
        "intervals": intervals,
        "no_interval": reason,
        "misfit": float(np.sqrt(np.mean(misfit**2))),
        "scatter": residual_scatter(points, law, floor),
        "floor_seen": law.floor > 0,
    }
    return {"law": law, "draws": draws, "points": points, "figures": figures}


def _effective(
    rows: Sequence[LossRow], base: str, fits: dict[str, Any], form: Form
) -> list[dict[str, Any]]:
    """For every row of another kind: the N (or D) at which the baseline reaches its loss.

    The loss of the row is as noisy as the fitted losses. The interval therefore samples both the
    law of the baseline and the loss of the row. The noise of the row is the larger of the scatter
    of the baseline and, if its kind has enough rows to estimate it, that of its kind.
    """
    found = []
    fitted = fits[base]
    for number, row in enumerate(row for row in rows if row.kind != base):
        record: dict[str, Any] = {"kind": row.kind, "study": row.study}
        record |= {name: row.value(name) for name in ("parameters", "tokens", "loss")}
        losses = _judged_losses(row, fitted["draws"], fits.get(row.kind, {}).get("draws"), number)
        for name, axis in _AXES.items():
            if axis in form:
                record[name] = _needs(fitted, axis, row, losses)
        found.append(record)
    return found


def _judged_losses(
    row: LossRow, base: BootstrapFits | None, own: BootstrapFits | None, seed: int
) -> np.ndarray | None:
    """Samples of the loss of a row, one per replicate of the law of the baseline."""
    if base is None:
        return None
    random = np.random.default_rng(10_000 + seed)
    noise = base.noise if own is None else np.maximum(base.noise, own.noise)
    drawn = row.value("loss") * np.exp(random.normal(size=len(noise)) * noise)
    rounding = row.cells["loss"].rounding
    return drawn + random.uniform(-rounding, rounding, len(noise))


def _needs(
    fitted: dict[str, Any], axis: Any, row: LossRow, losses: np.ndarray | None
) -> dict[str, Any]:
    names = ("parameters", "tokens") if axis == "n" else ("tokens", "parameters")
    own, other = (row.value(name) for name in names)
    trained = getattr(fitted["points"], names[0])

    def ratio(law: Law, loss: float) -> float | None:
        needs = law.reaching(axis, loss, other)
        return needs / own if needs is not None else None

    needs = fitted["law"].reaching(axis, row.value("loss"), other)
    draws, reason = fitted["draws"], fitted["figures"]["no_interval"]
    ends: tuple[float | None, float | None] = (None, None)
    if draws is not None and losses is not None and reason is None:
        ends = interval(list(map(ratio, draws.laws, losses.tolist())))
    return {
        "needs": needs,
        "ratio": ratio(fitted["law"], row.value("loss")),
        "interval": list(ends),
        "no_interval": reason,
        "extrapolated": needs is None or not trained.min() <= needs <= trained.max(),
    }


def _exponents(fits: dict[str, Any], base: str) -> list[dict[str, Any]]:
    """Differences of the exponents of each kind to the baseline, with bootstrap intervals.

    `differs` is None without an interval: whether the exponents differ is then unknown.
    """
    found = []
    for kind, fitted in fits.items():
        if kind == base:
            continue
        reason = _no_difference({name: fits[name] for name in (kind, base)})
        for name in ("alpha", "beta"):
            if name in fitted["figures"]["values"]:
                own, other = (f["figures"]["values"][name] for f in (fitted, fits[base]))
                ends = Interval(None, None, reason)
                if reason is None:
                    pairs = zip(fitted["draws"].laws, fits[base]["draws"].laws, strict=True)
                    draws = [mine.named()[name] - base_.named()[name] for mine, base_ in pairs]
                    ends = Interval(*interval(draws))
                found.append({"kind": kind, "exponent": name, "difference": own - other})
                found[-1] |= {"interval": [ends.low, ends.high], "no_interval": reason}
                found[-1] |= {"differs": ends.excludes_zero}
    return found


def _no_difference(pair: dict[str, dict[str, Any]]) -> str | None:
    """Why the exponents of two kinds cannot be compared; None if they can.

    One of the two laws may fit its rows exactly. The scatter of the difference is then that of the
    other kind.
    """
    reasons = {kind: fitted["figures"]["no_interval"] for kind, fitted in pair.items()}
    if all(fitted["draws"] for fitted in pair.values()) and None in reasons.values():
        return None
    return "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items() if reason)


def _comparisons(result: dict[str, Any]) -> int:
    """Number of differences in the result that have an interval."""
    judged = [row[axis] for row in result["effective"] for axis in _AXES if axis in row]
    return sum(row["no_interval"] is None for row in (*judged, *result["exponents"]))


def _summary(
    result: dict[str, Any], points: Points, requested: Form | Literal["auto"], floor: bool
) -> list[str]:
    """The conclusions that the numbers support, as sentences."""
    sentences = []
    line = line_of(points)
    if line is not None:
        sentences.append(
            f"Parameters and tokens rise together in this table (D ~ N^{line:.2f}), so α and β "
            "cannot be determined separately: the exponent applies to this relation of N and D "
            "only, and so does the effective capacity."
            + (" The table does not determine the requested form." if requested == "nd" else "")
        )
    for kind, figures in result["fits"].items():
        if figures["spare"] == 0:
            sentences.append(
                f"{kind}: {figures['rows']} rows for as many free numbers. The curve goes through "
                "every row, so the rows do not test the formula."
            )
        if floor and not figures["floor_seen"]:
            sentences.append(
                f"{kind}: the fitted floor is E = 0: the loss shows no curvature "
                "toward a floor in this range."
            )
    for row in result["exponents"]:
        lead = (
            f"{_GREEK[row['exponent']]} of {row['kind']} minus that of {result['baseline']}: "
            f"{row['difference']:+.3f}"
        )
        if row["differs"] is None:
            sentences.append(f"{lead}: no interval, so no conclusion ({row['no_interval']}).")
            continue
        low, high = row["interval"]
        outcome = "the exponents differ" if row["differs"] else "no significant difference"
        sentences.append(f"{lead} ({low:+.3f} to {high:+.3f}): {outcome}.")
    for finding in result["contradictions"]:
        sentences.append(
            f"Line {finding['line']} ({finding['kind']}, {finding['parameters']:,.0f} "
            f"parameters) is inconsistent: {finding['finding']}."
        )
    return sentences


def _write(
    result: dict[str, Any], rows: Sequence[LossRow], fits: dict[str, Any], files: dict[str, Path]
) -> None:
    kinds = {
        kind: (points_of([row for row in rows if row.kind == kind]), fits.get(kind, {}).get("law"))
        for kind in dict.fromkeys(row.kind for row in rows)
    }
    picture = scaling_figure(kinds, result["form"])
    files["json"].parent.mkdir(parents=True, exist_ok=True)
    result["files"] = {name: str(file) for name, file in files.items()}
    write_atomic(files["svg"], picture.svg.encode())
    write_atomic(files["png"], picture.png)
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(files["json"], text.encode())
