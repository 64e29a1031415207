"""Decides which runs are comparable: same data, order, tokenizer and budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leviathan.report.runs import Run, RunRecord


def _order(run: Run) -> str | None:
    window = run.config.get("data", {}).get("shuffle_window")
    batch = run.config["train"]["global_batch_size"]
    return f"seed {run.seed}, window {window}, {batch} samples per step"


def _evaluated_on(run: Run) -> str | None:
    if run.perplexity is None or run.compares_loop:
        return "val, by the training loop" if run.loop_step is not None else None
    data = run.perplexity.get("data") or {}
    return f"{data.get('split')} of {_short(data.get('fingerprint'))}" if data else None


def _short(fingerprint: str | None) -> str | None:
    return fingerprint[:12] if fingerprint else None


def _step(step: int | None) -> str | None:
    return f"step {step:,}" if step is not None else None


CHECKS: tuple[tuple[str, Callable[[Run], str | None]], ...] = (
    ("Tokenizer", lambda run: _short(run.tokenizer)),
    ("Training data", lambda run: _short(run.data)),
    ("Data order", _order),
    ("Context length", lambda run: f"{run.config['model']['seq_len']:,} tokens"),
    ("Planned budget", lambda run: f"{run.planned_steps * run.tokens_per_step:,} tokens"),
    ("Trained so far", lambda run: f"{run.step * run.tokens_per_step:,} tokens"),
    ("Evaluated at", lambda run: _step(run.loss_step)),
    ("Evaluated on", _evaluated_on),
)


@dataclass(frozen=True)
class Pair:
    """A run and its counterpart of the baseline; `differs` names the failed checks."""

    entry: RunRecord
    base: RunRecord
    differs: tuple[str, ...]

    def counts(self, allow_unequal: bool) -> bool:
        """Whether a difference between the two may be computed."""
        return not self.differs or allow_unequal

    def found(self) -> list[str]:
        """Each failed check with the values of the run and of the baseline."""
        sides = (self.entry.run, self.base.run)
        return [
            f"{name.lower()}: " + " against ".join(ask(run) or "not recorded" for run in sides)
            for name, ask in CHECKS
            if name.lower() in self.differs
        ]


def differing(run: Run, base: Run) -> tuple[str, ...]:
    """The checks in which two runs differ, or whose values are unknown."""
    failed = []
    for name, ask in CHECKS:
        values = (ask(run), ask(base))
        known = None not in values or name.startswith("Evaluated")
        if values[0] != values[1] or not known:
            failed.append(name.lower())
    return tuple(failed)


def with_common_losses(entries: Sequence[RunRecord]) -> tuple[list[RunRecord], str]:
    """The runs with comparable validation losses, and a note if losses were replaced.

    `leviathan perplexity` may have scored only some of the runs, or the runs at different steps or
    on different data, while the training loop scored the same split of all runs at the same step.
    In that case the losses of the training loop are compared.
    """
    last = max((entry.run.loop_step or 0 for entry in entries), default=0)
    scored = [entry for entry in entries if last and entry.run.loop_step == last]
    evaluated = [entry.run.perplexity is not None for entry in scored]
    steps = {entry.run.loss_step for entry in scored}
    data = {_evaluated_on(entry.run) for entry in scored}
    if not any(evaluated) or (all(evaluated) and len(steps) == len(data) == 1):
        return list(entries), ""
    changed = [
        replace(entry, run=replace(entry.run, compares_loop=entry.run.perplexity is not None))
        if entry.run.loop_step == last
        else entry
        for entry in entries
    ]
    where = "at different steps" if len(steps) > 1 else "on different data"
    why = f"has scored the runs {where}" if all(evaluated) else "has not scored all runs"
    return changed, (
        f"`leviathan perplexity` {why}, so the report compares the validation losses of the "
        f"training loop at step {last:,}, which exist for all runs."
    )


def pairs_of(entries: Sequence[RunRecord]) -> list[Pair]:
    """For every run of another arm: the run of the baseline that matches it best."""
    bases = [entry for entry in entries if entry.baseline]
    pairs = []
    for entry in entries:
        if entry.baseline or not bases:
            continue
        same_sweep = [base for base in bases if base.sweep == entry.sweep] or bases
        found = [Pair(entry, base, differing(entry.run, base.run)) for base in same_sweep]
        pairs.append(min(found, key=lambda pair: len(pair.differs)))
    return pairs


def pairing_of(
    entries: Sequence[RunRecord], pairs: Sequence[Pair], allow_unequal: bool
) -> dict[str, Any]:
    """The checks over all runs of a comparison, and rejected pairs."""
    checks = []
    for name, ask in CHECKS:
        values = list(dict.fromkeys(ask(entry.run) or "not recorded" for entry in entries))
        failed = any(name.lower() in pair.differs for pair in pairs)
        checks.append({"check": name, "values": values, "same": not failed})
    unequal = [pair for pair in pairs if pair.differs]
    refused = [
        {
            "run": str(pair.entry.run.path),
            "arm": pair.entry.arm,
            "baseline": str(pair.base.run.path),
            "differs": list(pair.differs),
            "found": pair.found(),
        }
        for pair in unequal
    ]
    return {
        "paired": bool(pairs) and len(unequal) < len(pairs),
        "allowed": allow_unequal and bool(unequal),
        "pairs": len(pairs) - (0 if allow_unequal else len(unequal)),
        "unequal": refused,
        "checks": checks,
        "note": _note(pairs, unequal, allow_unequal),
    }


def _note(pairs: Sequence[Pair], unequal: Sequence[Pair], allow_unequal: bool) -> str:
    if not unequal:
        return ""
    what = join_with_and(list(dict.fromkeys(name for pair in unequal for name in pair.differs)))
    arms = join_with_and(list(dict.fromkeys(pair.entry.arm for pair in unequal)))
    if allow_unequal:
        return (
            f"{arms} and the baseline differ in {what}, or the file that records it is missing. "
            "Their difference was computed because of --allow-unequal: it is not due to the "
            "input embedding alone."
        )
    whose = "These runs are" if len(unequal) == len(pairs) else f"{arms} (some runs) are"
    return (
        f"{whose} not paired with the baseline: they differ in {what}, or the file that records "
        "it is missing. They are shown side by side without differences."
    )


def join_with_and(words: Sequence[str]) -> str:
    """Formats a list: `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
