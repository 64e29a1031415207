"""What turns texts into ids: tiktoken, the reference, or a faster encoder with the same ids.

gigatoken is several times faster because it remembers the words it has seen. It is used where its
ids were found to be tiktoken's: a vocabulary cut by a pattern that it knows, tried on texts that
are hard to cut; and `leviathan.data.prepare.tokenize` continues comparing while it works.
"""

import re
from collections.abc import Iterator
from tempfile import NamedTemporaryFile
from typing import Any, Literal, Protocol

import numpy as np
import psutil

from leviathan.console import say
from leviathan.data.comparison_texts import FIXED_TEXTS
from leviathan.data.encodings import CL100K_PATTERN, O200K_PATTERN, R50K_PATTERN
from leviathan.data.tokenizer import Tokenizer, UnencodableText
from leviathan.errors import DataError

Backend = Literal["gigatoken", "tiktoken"]

# Split pattern → gigatoken's name for it. gpt2 and r50k_base have the same pattern.
_SCHEMES = {O200K_PATTERN: "o200k", CL100K_PATTERN: "cl100k", R50K_PATTERN: "gpt2"}

_LONG_BLANKS = 250_000  # tiktoken may give up on a run of twice as many
_PIECE = 1 << 23  # characters; longer texts are encoded in pieces
_LONGEST_PIECE = 1 << 25
# Every pattern above ends a word here: after a line's end, before the next line's first letter.
_CUT = re.compile(r"(?<=[^\s])\n(?=[A-Za-z0-9])")
_GROWTH = 1 << 28  # bytes of remembered words after which gigatoken starts afresh …
_BETWEEN = 1 << 25  # … looked at after every so many bytes of text


class Encoder(Protocol):
    """Turns texts into ids."""

    backend: Backend

    def encode(self, text: str, content: bytes | None = None) -> np.ndarray:
        """The ids of a text, uint32; a special token's string in it stays text.

        Args:
            text: what to encode.
            content: its UTF-8, if it is available.

        Raises:
            UnencodableText: where tiktoken cannot encode the text.
        """
        ...


class TiktokenEncoder:
    """The reference."""

    backend: Backend = "tiktoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, content: bytes | None = None) -> np.ndarray:
        """The ids of `text`, uint32."""
        return self._tokenizer.encode_array(text)


class GigatokenEncoder:
    """gigatoken, bounded in memory; texts on which it and tiktoken may differ go to tiktoken.

    Raises:
        DataError: it cannot work with this vocabulary, or its ids are others.
    """

    backend: Backend = "gigatoken"

    def __init__(self, tokenizer: Tokenizer) -> None:
        scheme = _SCHEMES.get(tokenizer.pattern)
        if scheme is None:
            raise DataError(
                "encoder.unsupported", "it does not know how this vocabulary cuts texts into words"
            )
        self._tokenizer, self._scheme = tokenizer, scheme
        self._process = psutil.Process()
        self._begin()
        for text in FIXED_TEXTS:
            if not np.array_equal(self.encode(text), tokenizer.encode_array(text)):
                raise DataError(
                    "encoder.different_ids", f"its ids of {text[:20]!r}… are not tiktoken's"
                )

    def _begin(self) -> None:
        """Makes the encoder, with nothing remembered."""
        try:
            from gigatoken.gigatoken_rs import BPETokenizer
        except ImportError as error:
            raise DataError("encoder.not_installed", f"it is not installed ({error})") from None
        self._encode: Any = None  # free the former one first
        with NamedTemporaryFile(suffix=".tiktoken") as file:
            file.write(self._tokenizer.rank_file)
            file.flush()
            try:
                self._encode = BPETokenizer.from_tiktoken(file.name, self._scheme, {}).encode
            except Exception as error:  # its own, undocumented
                raise DataError(
                    "encoder.unsupported", f"it refuses the vocabulary: {error}"
                ) from None
        self._fed, self._size = 0, self._process.memory_info().rss

    def encode(self, text: str, content: bytes | None = None) -> np.ndarray:
        """The ids of `text`, uint32."""
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
        except BaseException as error:  # a panic in Rust is no Exception
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
        say(f"warning: gigatoken failed on a text ({error}); tiktoken took it", style="yellow")
        self._begin()  # who knows in which state it is
        return self._tokenizer.encode_array(text)


def _has_long_blanks(text: str) -> bool:
    """Whether there may be a run of 2 * _LONG_BLANKS blanks: it would fill one of these blocks."""
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
    """The encoder of a vocabulary: `auto` takes the fastest that gives tiktoken's ids.

    Raises:
        DataError: the backend asked for cannot be used with this vocabulary.
    """
    if backend == "tiktoken":
        return TiktokenEncoder(tokenizer)
    try:
        return GigatokenEncoder(tokenizer)
    except (DataError, UnencodableText) as error:
        if backend == "gigatoken":
            raise DataError(
                "encoder.unavailable", f"backend gigatoken: {error}; set backend=tiktoken"
            ) from None
        say(f"warning: encoding with tiktoken, gigatoken cannot be used: {error}", style="yellow")
        return TiktokenEncoder(tokenizer)
