"""Prompts and new tokens in one context: truncated, capped and counted tokens."""

from hypothesis import given
from hypothesis import strategies as st

from leviathan.evaluate.generate import TruncationCounts, fit_prompt


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 128))
def test_they_fit_and_nothing_is_lost_uncounted(length: int, new_tokens: int, window: int) -> None:
    ids = list(range(length))
    fitted, counts = fit_prompt(ids, new_tokens, window), TruncationCounts()
    fitted.count(counts)
    assert fitted.ids == ids[length - len(fitted.ids) :]
    assert fitted.ids
    assert fitted.new_tokens >= 1
    assert len(fitted.ids) + fitted.new_tokens <= max(2, window)
    assert counts.tokens == length - len(fitted.ids)
    assert counts.contexts == (counts.tokens > 0)
    assert counts.capped_generations == (fitted.new_tokens < new_tokens)
    if length < window:
        assert fitted.ids == ids
        assert fitted.new_tokens == min(new_tokens, window - length)
