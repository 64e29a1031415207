"""Summary of a report: the results in one paragraph, and what runs of this size can show."""

from typing import Any

from leviathan.evaluate.intervals import Interval, comparisons_note
from leviathan.formatting import format_count

SMALL_RUN_TOKENS = 1_000_000_000
_MANY = 4  # above this number, only the best and the worst arm are named


def summarize(report: dict[str, Any]) -> str:
    """One paragraph: the results, and what runs of this size can and cannot show."""
    sentences = []
    for group in report["groups"]:
        sentences += _group_outcome(group)
    arms = [arm for group in report["groups"] for arm in group["arms"]]
    tokens = max(arm["tokens"] for arm in arms)
    same = tokens == min(arm["tokens"] for arm in arms)
    runs = "This run" if len(report["runs"]) == 1 else "Each of these runs"
    amount = format_count(tokens) if same else f"at most {format_count(tokens)}"
    seeds = min(len(arm["seeds"]) for arm in arms)
    if tokens < SMALL_RUN_TOKENS:
        sentences.append(
            f"{runs} saw {amount} tokens. A run of this size verifies the pipeline and provides "
            "paired data; it does not show which model is better: in the published comparison, "
            "the order of the smallest models still changed after about 3 billion tokens."
        )
    elif len(arms) > 1 and seeds < 2:
        sentences.append(
            f"{runs} saw {amount} tokens, with one seed each: every difference includes "
            "seed-to-seed variance, which no interval on this page covers."
        )
    return " ".join([*sentences, report["caution"]]).strip()


def _group_outcome(group: dict[str, Any]) -> list[str]:
    arms = [
        arm
        for arm in group["arms"][1:]
        if (arm["relative"] or {}).get("validation_nats") is not None
    ]
    if not arms:
        return [group["pairing"]["note"]] if group["pairing"]["note"] else []
    arms.sort(key=lambda arm: arm["relative"]["validation_nats"])
    count = comparisons_note(sum(_interval_of(group, arm)[2] is None for arm in arms))
    named = arms if len(arms) <= _MANY else [arms[0], arms[-1]]
    lead = f"{group['name']}: " if group["name"] else ""
    sentences = [_outcome(group, arm) for arm in named]
    if len(named) < len(arms):
        sentences[0] = f"Best of {len(arms)} arms: {sentences[0]}"
        sentences[1] = f"Worst: {sentences[1]}"
    return [lead + sentences[0], *sentences[1:], *([count] if count else [])]


def _outcome(group: dict[str, Any], arm: dict[str, Any]) -> str:
    relative, base = arm["relative"], group["arms"][0]
    nats = relative["validation_nats"]
    side = "below" if nats < 0 else "above"
    # Over the paired seeds, so that the figures of this sentence are consistent.
    return (
        f"{arm['label']} ends at {arm['validation_loss']:.4f} nats per token on the validation "
        f"split, {abs(nats):.4f} {side} {base['label']}{_interval(group, arm)}: its "
        f"perplexity is {abs(relative['perplexity_percent']):.1f} % "
        f"{'lower' if relative['perplexity_percent'] < 0 else 'higher'}."
    )


def _interval(group: dict[str, Any], arm: dict[str, Any]) -> str:
    """The interval of an arm, or the reason why there is none."""
    over, found, reason = _interval_of(group, arm)
    if reason is not None:
        return f" (no interval: {reason})"
    ends = f"{found.low:+.4f} to {found.high:+.4f}"
    verb = "excludes" if found.excludes_zero else "includes"
    zero = f", which {verb} zero" if over != "documents" else ""
    return f" (95 % interval over {over}: {ends}{zero})".replace("-", "−")


def _interval_of(group: dict[str, Any], arm: dict[str, Any]) -> tuple[str, Interval, str | None]:
    """The unit of the interval (seeds if sufficient, else documents), and why there is none."""
    seeds, pair = arm["relative"]["seeds"], _pair_of(group["frequency"], arm["label"])
    if seeds["low"] is not None:
        return f"{seeds['seeds']} seeds", Interval(seeds["low"], seeds["high"]), None
    nats = arm["relative"]["validation_nats"]
    # The buckets may be of another split than the validation loss and then do not apply to it.
    if pair and pair["all"]["low"] is not None and abs(pair["all"]["difference"] - nats) < 1e-3:
        return "documents", Interval(pair["all"]["low"], pair["all"]["high"]), None
    reasons = [seeds["no_interval"], pair["all"]["no_interval"] if pair else None]
    return "", Interval(None, None), ", ".join(reason for reason in reasons if reason)


def _pair_of(frequency: dict[str, Any] | None, label: str) -> dict[str, Any] | None:
    pairs = frequency["pairs"] if frequency else []
    return next((pair for pair in pairs if pair["label"] == label), None)
