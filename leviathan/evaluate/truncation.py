"""What does not fit a model's context, counted so that every result can report it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leviathan.console import say


@dataclass
class TruncationCounts:
    """Of some requests.

    Attributes:
        contexts: contexts that were truncated from the left.
        tokens: tokens that were cut off them.
        capped_generations: generations that got fewer new tokens than asked for.
    """

    contexts: int = 0
    tokens: int = 0
    capped_generations: int = 0

    def add_context(self, dropped: int) -> None:
        """Counts one context with as many tokens cut off, if any."""
        self.contexts += dropped > 0
        self.tokens += dropped

    def report(self, subject: str, window: int) -> None:
        """Warns on the console where anything was truncated."""
        if self.contexts:
            say(
                f"warning: {subject}: {self.contexts:,} contexts did not fit the model's context "
                f"of {window:,} tokens and were truncated from the left, by {self.tokens:,} "
                "tokens in all",
                style="yellow",
            )
        if self.capped_generations:
            say(
                f"warning: {subject}: {self.capped_generations:,} generations were capped below "
                f"the number of new tokens asked for, to what the model's context of {window:,} "
                "tokens leaves after the prompt",
                style="yellow",
            )


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt and its new tokens as they fit the context together.

    Attributes:
        ids: the prompt, without its first `dropped` ids.
        new_tokens: how many may follow.
        dropped: ids cut off.
        capped: whether `new_tokens` is fewer than asked for.
    """

    ids: list[int]
    new_tokens: int
    dropped: int
    capped: bool

    def count(self, counts: TruncationCounts) -> None:
        """Adds what was lost to `counts`."""
        counts.add_context(self.dropped)
        counts.capped_generations += self.capped


def fit_prompt(ids: Sequence[int], new_tokens: int, window: int) -> FittedPrompt:
    """Makes room for a continuation without giving up any of the prompt, if that is possible.

    A prompt that leaves some room keeps all its ids, and the new tokens are capped to the room. A
    prompt that fills the window alone is truncated from the left, as contexts of log-likelihood
    requests are; the room that makes is what was asked for, at most half of the window. (vLLM
    refuses such a prompt, lm-eval's `hf` truncates it, and also one that would have fit.)
    """
    room = window - len(ids)
    if room > 0:
        return FittedPrompt(list(ids), min(new_tokens, room), 0, new_tokens > room)
    allowed = min(new_tokens, max(1, window // 2))
    kept = max(1, window - allowed)
    return FittedPrompt(list(ids[-kept:]), allowed, len(ids) - kept, allowed < new_tokens)


def sum_counts(counts: Mapping[str, TruncationCounts]) -> TruncationCounts:
    """The sum over tasks."""
    return TruncationCounts(
        sum(one.contexts for one in counts.values()),
        sum(one.tokens for one in counts.values()),
        sum(one.capped_generations for one in counts.values()),
    )
