"""Incremental decoding of token ids: only complete characters, and no part of a stop string."""

import codecs
from collections.abc import Sequence

from leviathan.data.tokenizer import Tokenizer


class TextStream:
    """The continuation of one prompt.

    Attributes:
        text: the final part of the text so far.
        stopped: whether a stop string ended it.
        tokens: number of added ids.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.text, self.stopped, self.tokens = "", False, 0
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def add(self, token: int) -> str:
        """Adds an id; returns the text that has become final."""
        assert not self.stopped
        self.tokens += 1
        return self._settle(self._bytes.decode(self._tokenizer.decode_bytes(token)))

    def end(self) -> str:
        """Ends the stream; returns the remaining text."""
        if self.stopped:
            return ""
        new = self._settle(self._bytes.decode(b"", final=True)) + self._held
        self.text, self._held = self.text + self._held, ""
        return new

    def _settle(self, new: str) -> str:
        """Returns the text that cannot be part of a stop string."""
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held, certain = True, "", text[: min(found)]
        else:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            certain, self._held = text[: len(text) - held], text[len(text) - held :]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
