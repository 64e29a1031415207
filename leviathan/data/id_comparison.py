"""Comparison of a tokenizer's ids with those of the tokenizer that it was made from, or written to.

A description can be read wrong in ways that no check of its fields finds, for instance where two
regular-expression engines differ. Equal ids on real and on difficult text are the last proof.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

from leviathan.data.fixed_texts import FIXED_TEXTS
from leviathan.data.prepare.stdlib_corpus import sample_texts
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import DataError

DOCUMENTS = 1_000
_SWEEP_STEP = 41  # of all code points, every so many
_CODE_POINTS = 0x20000
_IDS_SHOWN = 8

EncodeBatch = Callable[[list[str]], Sequence[Sequence[int]]]


@lru_cache(maxsize=1)
def comparison_texts() -> tuple[str, ...]:
    """The fixed list, code points of every script, and 1,000 documents of this Python's library."""
    codes = [code for code in range(0x20, _CODE_POINTS, _SWEEP_STEP) if not 0xD800 <= code < 0xE000]
    sweep = [
        "".join(f"a{chr(code)}b 1{chr(code)} {chr(code)}" for code in codes[first : first + 100])
        for first in range(0, len(codes), 100)
    ]
    return (*FIXED_TEXTS, *sweep, *sample_texts(DOCUMENTS))


def compare_ids(tokenizer: Tokenizer, encode_batch: EncodeBatch, other: str) -> int:
    """Encodes `comparison_texts` with both and compares the ids.

    Args:
        tokenizer: ours.
        encode_batch: the other one's ids of several texts, without tokens that it adds around
            them, and with the strings of special tokens taken as text.
        other: what to call the other one in the message.

    Returns:
        The number of texts.

    Raises:
        DataError: the ids differ; names the number of such texts, and the first difference.
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
        f"{len(different):,} of {len(texts):,} texts get other ids than from {other}; the first at "
        f"{texts[number][begin : begin + 40]!r}: {other} gives {their[at : at + _IDS_SHOWN]}, "
        f"this tokenizer {own[at : at + _IDS_SHOWN]}"
    )
