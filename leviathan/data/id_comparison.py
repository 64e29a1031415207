"""Comparison of a tokenizer's ids with those of its source or of its export.

Checking the fields of a tokenizer description is not sufficient: two regular-expression engines,
for example, may interpret a pattern differently. The ids of real and of difficult texts are
therefore compared as well.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from leviathan.data.comparison_texts import FIXED_TEXTS
from leviathan.data.prepare.stdlib_corpus import sample_texts
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import DataError

DOCUMENTS = 1_000
_SWEEP_STEP = 41  # distance between the sampled code points
_CODE_POINTS = 0x20000
_IDS_SHOWN = 8

EncodeBatch = Callable[[list[str]], Sequence[Sequence[int]]]


@lru_cache(maxsize=1)
def comparison_texts() -> tuple[str, ...]:
    """Yields the fixed texts, code points of every script, and 1,000 texts of Python's library."""
    codes = [code for code in range(0x20, _CODE_POINTS, _SWEEP_STEP) if not 0xD800 <= code < 0xE000]
    sweep = [
        "".join(f"a{chr(code)}b 1{chr(code)} {chr(code)}" for code in codes[first : first + 100])
        for first in range(0, len(codes), 100)
    ]
    return (*FIXED_TEXTS, *sweep, *sample_texts(DOCUMENTS))


def compare_ids(tokenizer: Tokenizer, encode_batch: EncodeBatch, other: str) -> int:
    """Encodes `comparison_texts` with two tokenizers and compares the ids.

    Args:
        tokenizer: the native tokenizer.
        encode_batch: encodes several texts with the other tokenizer. It must not add tokens, and
            must encode the strings of special tokens as ordinary text.
        other: name of the other tokenizer for the message.

    Returns:
        The number of texts.

    Raises:
        DataError: the ids differ; the message has the number of texts and the first difference.
    """
    texts = comparison_texts()
    theirs = encode_batch(list(texts))
    ours = [tokenizer.encode(text) for text in texts]
    different = [
        number
        for number, (own, their) in enumerate(zip(ours, theirs, strict=True))
        if own != list(their)
    ]
    if not different:
        return len(texts)
    number = different[0]
    own, their = ours[number], list(theirs[number])
    pairs = enumerate(zip(own, their, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(own), len(their)))
    begin = max(0, len(tokenizer.decode(own[:at])) - 10)
    raise DataError(
        "tokenizer.different_ids",
        f"the ids of {len(different):,} of {len(texts):,} texts differ from those of {other}; the "
        f"first difference is at {texts[number][begin : begin + 40]!r}: {other} gives "
        f"{their[at : at + _IDS_SHOWN]}, this tokenizer {own[at : at + _IDS_SHOWN]}",
    )
