"""The comparison of ids covers much text, the same each time, and names the first difference."""

from pathlib import Path

from errors import raises_error

from leviathan.data.comparison_texts import FIXED_TEXTS
from leviathan.data.id_comparison import DOCUMENTS, compare_ids, comparison_texts
from leviathan.data.prepare.stdlib_corpus import sample_texts
from leviathan.data.tokenizer import load_tokenizer


def test_a_thousand_documents_and_the_fixed_list() -> None:
    texts = comparison_texts()
    assert set(FIXED_TEXTS) <= set(texts)
    assert len(sample_texts(DOCUMENTS)) == DOCUMENTS
    assert len(texts) >= DOCUMENTS + len(FIXED_TEXTS)
    assert len(set(texts)) == len(texts)
    assert sample_texts(50) == sample_texts(50) == sample_texts(DOCUMENTS)[:50]


def test_every_kind_of_text_is_on_the_list() -> None:
    whole = "\n".join(FIXED_TEXTS)
    for piece in ("e\u0301", "1234567", "def f(", "今天", "👩‍🚀", "<|endoftext|>", "한국어", "<s>"):
        assert piece in whole
    assert any(text.startswith(" leading") for text in FIXED_TEXTS)


def test_the_first_difference_is_named(tiny_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer)
    compared = compare_ids(tokenizer, lambda texts: [tokenizer.encode(t) for t in texts], "itself")
    assert compared == len(comparison_texts())

    def composed(texts: list[str]) -> list[list[int]]:
        return [tokenizer.encode(text.replace("e\u0301", "\u00e9")) for text in texts]

    with raises_error("tokenizer.different_ids", "NFC") as error:
        compare_ids(tokenizer, composed, "NFC")
    assert "e\u0301" in str(error.value)
