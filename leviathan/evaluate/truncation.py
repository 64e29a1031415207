"""Fits prompts to a model's context, and counts truncated contexts and capped generations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leviathan.console import say


@dataclass
class TruncationCounts:
    """Counts of truncation for a set of requests.

    Attributes:
        contexts: number of contexts that were truncated from the left.
        tokens: number of tokens removed from them.
        capped_generations: number of generations limited below the requested number of new tokens.
    """

    contexts: int = 0
    tokens: int = 0
    capped_generations: int = 0

    def add_context(self, dropped: int) -> None:
        """Counts a context from which `dropped` tokens (may be 0) were removed."""
        self.contexts += dropped > 0
        self.tokens += dropped

    def report(self, subject: str, window: int) -> None:
        """Prints a warning if anything was truncated or capped."""
        if self.contexts:
            say(
                f"warning: {subject}: {self.contexts:,} context(s) did not fit the model's context "
                f"of {window:,} tokens and were truncated from the left, by a total of "
                f"{self.tokens:,} tokens",
                style="yellow",
            )
        if self.capped_generations:
            say(
                f"warning: {subject}: {self.capped_generations:,} generation(s) were capped below "
                "the requested number of new tokens, because prompt and new tokens must fit the "
                f"model's context of {window:,} tokens",
                style="yellow",
            )


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt and a number of new tokens that fit the context together.

    Attributes:
        ids: the prompt without its first `dropped` ids.
        new_tokens: maximum number of new tokens.
        dropped: number of ids removed from the prompt.
        capped: whether `new_tokens` is less than requested.
    """

    ids: list[int]
    new_tokens: int
    dropped: int
    capped: bool

    def count(self, counts: TruncationCounts) -> None:
        """Adds this prompt to `counts`."""
        counts.add_context(self.dropped)
        counts.capped_generations += self.capped


def fit_prompt(ids: Sequence[int], new_tokens: int, window: int) -> FittedPrompt:
    """Fits a prompt and its continuation into the window, without truncating it if possible.

    A prompt shorter than the window keeps all its ids, and the number of new tokens is limited to
    the rest of the window. A prompt that fills the window is truncated from the left, like the
    contexts of log-likelihood requests, to make room for the requested tokens, at most half of the
    window. (vLLM refuses such a prompt. lm-eval's `hf` model truncates it, but also truncates
    prompts that fit.)
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
