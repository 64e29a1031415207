"""Text from single tokens: only complete characters, and no part of a stop string."""

from pathlib import Path

import pytest

from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.evaluate.generate import TextStream


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Tokenizer:
    return load_tokenizer(tiny_tokenizer)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("return self", [], "return self"),
        ("naïve → 東京 👩‍🚀", ["\0"], "naïve → 東京 👩‍🚀"),
        ("a line\nand more", ["\n"], "a line"),
        ("xx END yy", ["END OF", "END"], "xx "),
        ("xx EN", ["END"], "xx EN"),
        ("aaab", ["aab"], "a"),
        ("stop", ["stop"], ""),
        ("both and", ["and", "oth"], "b"),
    ],
)
def test_pieces_make_the_text(
    tokenizer: Tokenizer, text: str, stops: list[str], expected: str
) -> None:
    stream, pieces = TextStream(tokenizer, stops), []
    for id in tokenizer.encode(text):
        pieces.append(stream.add(id))
        assert "\N{REPLACEMENT CHARACTER}" not in pieces[-1]
        if stream.stopped:
            break
    pieces.append(stream.end())
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == (expected != text)


def test_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    for id in tokenizer.encode("a") + tokenizer.encode("東")[:1]:
        stream.add(id)
    assert stream.end() in ("\N{REPLACEMENT CHARACTER}", "東")
    assert stream.text in ("a\N{REPLACEMENT CHARACTER}", "a東")
