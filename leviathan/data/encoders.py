"""Encoders: tiktoken, the reference, or a faster library with the same ids.

gigatoken is several times faster because it caches the ids of words. It is used only if its ids
equal tiktoken's: the vocabulary has a pattern that gigatoken supports, and the ids of difficult
texts are compared; `leviathan.data.prepare.tokenize` continues to compare ids while it encodes.
"""

import re
from collections.abc import Iterator
from tempfile import NamedTemporaryFile
from typing import Any, Literal, Protocol

import numpy as np
import psutil

from leviathan.console import say
from leviathan.data.comparison_texts import FIXED_TEXTS
from leviathan.data.tokenizer import (
    CL100K_PATTERN,
    O200K_PATTERN,
    R50K_PATTERN,
    Tokenizer,
    UnencodableText,
)
from leviathan.errors import DataError

Backend = Literal["gigatoken", "tiktoken"]

# Split pattern → gigatoken's name for it. gpt2 and r50k_base have the same pattern.
_SCHEMES = {O200K_PATTERN: "o200k", CL100K_PATTERN: "cl100k", R50K_PATTERN: "gpt2"}

_LONG_BLANKS = 250_000  # tiktoken may fail on a run of twice as many
_PIECE = 1 << 23  # characters; longer texts are encoded in pieces
_LONGEST_PIECE = 1 << 25
# Every pattern above ends a word here: after a line break, before the first letter of a line.
_CUT = re.compile(r"(?<=[^\s])\n(?=[A-Za-z0-9])")
_GROWTH = 1 << 28  # bytes of cached words after which gigatoken restarts with an empty cache …
_BETWEEN = 1 << 25  # … checked whenever this many bytes of text are encoded


class Encoder(Protocol):
    """Encodes texts as token ids."""

    backend: Backend

    def encode(self, text: str, content: bytes | None = None) -> np.ndarray:
        """Encodes a text; strings of special tokens are encoded as ordinary text.

        Args:
            text: the text.
            content: its UTF-8 bytes, if available.

        Raises:
            UnencodableText: tiktoken cannot encode the text.
        """
        ...


class TiktokenEncoder:
    """The reference encoder."""

    backend: Backend = "tiktoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, content: bytes | None = None) -> np.ndarray:
        """Token ids of `text`, uint32."""
        return self._tokenizer.encode_array(text)


class GigatokenEncoder:
    """gigatoken with bounded memory; difficult texts are passed to tiktoken.

    Raises:
        DataError: it does not support this vocabulary, or its ids differ.
    """

    backend: Backend = "gigatoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        scheme = _SCHEMES.get(tokenizer.pattern)
        if scheme is None:
            raise DataError(
                "encoder.unsupported", "it does not support the split pattern of this vocabulary"
            )
        self._tokenizer, self._scheme = tokenizer, scheme
        self._process = psutil.Process()
        self._begin()
        for text in FIXED_TEXTS:
            if not np.array_equal(self.encode(text), tokenizer.encode_array(text)):
                raise DataError(
                    "encoder.different_ids", f"its ids of {text[:20]!r}… differ from tiktoken's"
                )

    def _begin(self) -> None:
        """Creates the encoder with an empty cache."""
        try:
            from gigatoken.gigatoken_rs import BPETokenizer
        except ImportError as error:
            raise DataError("encoder.not_installed", f"it is not installed ({error})") from None
        self._encode: Any = None  # free the previous one first
        with NamedTemporaryFile(suffix=".tiktoken") as file:
            file.write(self._tokenizer.rank_file)
            file.flush()
            try:
                self._encode = BPETokenizer.from_tiktoken(file.name, self._scheme, {}).encode
            except Exception as error:  # an undocumented attribute
                raise DataError(
                    "encoder.unsupported", f"it rejects the vocabulary: {error}"
                ) from None
        self._fed, self._size = 0, self._process.memory_info().rss

    def encode(self, text: str, content: bytes | None = None) -> np.ndarray:
        """Token ids of `text`, uint32."""
        if len(text) > _LONG_BLANKS:
            return self._encode_long(text)
        return self._encode_piece(text, content or text.encode())

    def _encode_piece(self, text: str, content: bytes) -> np.ndarray:
        self._fed += len(content)
        if self._fed > _BETWEEN:
            self._fed = 0
            if self._process.memory_info().rss - self._size > _GROWTH:
                self._begin()
        try:
            return self._encode(content)
        except Exception as error:
            return self._instead(text, error)
        except BaseException as error:  # a Rust panic is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            return self._instead(text, error)

    def _encode_long(self, text: str) -> np.ndarray:
        if _has_long_blanks(text):
            return self._tokenizer.encode_array(text)
        return np.concatenate(
            [
                self._encode_piece(piece, piece.encode())
                if len(piece) <= _LONGEST_PIECE
                else self._tokenizer.encode_array(piece)
                for piece in _pieces(text)
            ]
        )

    def _instead(self, text: str, error: BaseException) -> np.ndarray:
        say(f"warning: gigatoken failed on a text ({error}); tiktoken encoded it", style="yellow")
        self._begin()  # its state is undefined after a panic
        return self._tokenizer.encode_array(text)


def _has_long_blanks(text: str) -> bool:
    """Whether there may be a run of 2 * _LONG_BLANKS blanks, which fills a block."""
    return any(
        text[place].isspace() and text[place : place + _LONG_BLANKS].isspace()
        for place in range(0, len(text) - _LONG_BLANKS + 1, _LONG_BLANKS)
    )


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE and (cut := _CUT.search(text, start + _PIECE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:] if start else text


def make_encoder(tokenizer: Tokenizer, backend: str = "auto") -> Encoder:
    """Creates the encoder of a vocabulary; `auto` selects the fastest with tiktoken's ids.

    Raises:
        DataError: the requested backend does not support this vocabulary.
    """
    if backend == "tiktoken":
        return TiktokenEncoder(tokenizer)
    try:
        return GigatokenEncoder(tokenizer)
    except (DataError, UnencodableText) as error:
        if backend == "gigatoken":
            raise DataError(
                "encoder.unavailable", f"backend gigatoken: {error}. Set backend=tiktoken"
            ) from None
        say(f"warning: encoding with tiktoken, gigatoken cannot be used: {error}", style="yellow")
        return TiktokenEncoder(tokenizer)
