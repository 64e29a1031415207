"""What came out, in one paragraph, and what a run of this size can and cannot show."""

from collections.abc import Sequence
from typing import Any

SMALL_RUN_TOKENS = 1_000_000_000


def verdict(
    rows: Sequence[dict[str, Any]], pairing: dict[str, Any], frequency: dict[str, Any] | None
) -> str:
    """One paragraph: what came out, and what a run of this size can and cannot show."""
    sentences = []
    if pairing["paired"]:
        sentences = [_outcome(rows[0], row, frequency) for row in rows[1:] if row.get("relative")]
        sentences = [text for text in sentences if text]
    elif pairing["note"]:
        sentences.append(pairing["note"])
    tokens = max(row["tokens"] for row in rows)
    same = tokens == min(row["tokens"] for row in rows)
    runs = "This run" if len(rows) == 1 else "Each of these runs"
    amount = _count(tokens) if same else f"at most {_count(tokens)}"
    if tokens < SMALL_RUN_TOKENS:
        sentences.append(
            f"{runs} saw {amount} tokens. A run of this size shows that the mechanics work "
            "and yields paired data; it does not show which model is better: in the published "
            "comparison the order of the smallest models still changed after about 3 billion "
            "tokens."
        )
    elif len(rows) > 1:
        sentences.append(
            f"{runs} saw {amount} tokens, with one seed each: the luck of a seed is part "
            "of every difference here, and no interval on this page covers it."
        )
    return " ".join(sentences)


def _outcome(
    base: dict[str, Any], row: dict[str, Any], frequency: dict[str, Any] | None
) -> str | None:
    relative = row["relative"]
    if relative.get("validation_nats") is None:
        return None
    nats = relative["validation_nats"]
    side = "below" if nats < 0 else "above"
    interval = ""
    pair = _pair_of(frequency, row["label"])
    # The strata may stand for another split than the validation loss: then they say nothing of it.
    if pair and pair["all"]["low"] is not None and abs(pair["all"]["difference"] - nats) < 1e-3:
        low, high = pair["all"]["low"], pair["all"]["high"]
        interval = f" (95 % interval over documents: {low:+.4f} to {high:+.4f})".replace("-", "−")
    return (
        f"{row['label']} ends at {row['validation_loss']:.4f} nats per token on the validation "
        f"split, {abs(nats):.4f} {side} {base['label']}{interval}: its perplexity is "
        f"{abs(relative['perplexity_percent']):.1f} % "
        f"{'lower' if relative['perplexity_percent'] < 0 else 'higher'}."
    )


def _pair_of(frequency: dict[str, Any] | None, label: str) -> dict[str, Any] | None:
    pairs = frequency["pairs"] if frequency else []
    return next((pair for pair in pairs if pair["label"] == label), None)


def _count(number: float) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"
