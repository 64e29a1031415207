"""All backends return the ids of tiktoken, and fail if tiktoken fails."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import zstandard
from errors import raises_error
from hypothesis import given, settings
from hypothesis import strategies as st

import leviathan.data.encoders as encoders
from leviathan.data.encoders import GigatokenEncoder, make_encoder
from leviathan.data.tokenizer import Tokenizer, UnencodableText, load_tokenizer

NAMES = ["o200k_base", "cl100k_base", "gpt2"]

HARD = {
    "letters": "a" * 50_000,
    "capitals": "A" * 50_000,
    "alternating": "Aa" * 50_000,
    "signs": "=" * 50_000,
    "ideographs": "".join(chr(0x4E00 + number % 20_000) for number in range(40_000)),
    "no word ends": "".join(random.Random(0).choices("abcdefghijklmnop", k=50_000)),
    "digits": "1234567890" * 5_000,
    "line ends": "\n" * 50_000,
    "carriage returns": "\r\n \r\r\n" * 5_000,
    "blanks": " " * 50_000 + "x",
    "a million blanks": " " * 400_000 + "x" + " " * 400_000,
    "other blanks": "\u00a0\u3000\u2003" * 5_000 + "x",
    "nul": "\0" * 5_000 + "a\0b",
    "special tokens": "<|endoftext|><|endofprompt|> <|fim_prefix|>" * 50,
    "accents": "a" + "\u0301" * 5_000,
    "emoji": "🐍👩\u200d👩\u200d👧" * 2_000,
    "contractions": "I'VE 's'T they'Re ''ll " * 2_000,
}


@pytest.fixture
def tiktoken_cache(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data/tiktoken_cache"))
    return shared / "data/tiktoken_cache"


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer: Path) -> Tokenizer:
    return load_tokenizer(tiny_tokenizer)


@pytest.fixture(scope="module")
def fast(tiny: Tokenizer) -> GigatokenEncoder:
    return GigatokenEncoder(tiny)


@pytest.mark.parametrize("kind", HARD)
def test_hard_texts(tiny: Tokenizer, fast: GigatokenEncoder, kind: str) -> None:
    assert np.array_equal(fast.encode(HARD[kind]), tiny.encode_array(HARD[kind]))


def test_every_character_between_others(tiny: Tokenizer, fast: GigatokenEncoder) -> None:
    """Both use the same Unicode version: letters, digits, marks and blanks are split equally."""
    surrogates = range(0xD800, 0xE000)
    for before, after in (("a", "b"), (" ", "1"), ("\n", " ")):
        text = "".join(
            f"{before}{chr(code)}{after}"
            for code in range(sys.maxunicode + 1)
            if code not in surrogates
        )
        assert np.array_equal(fast.encode(text), tiny.encode_array(text))


@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text(tiny: Tokenizer, fast: GigatokenEncoder, text: str) -> None:
    assert np.array_equal(fast.encode(text), tiny.encode_array(text))


@settings(max_examples=300)
@given(st.text(st.sampled_from("aZ'sTlé \t\n\r1²/=-\u00a0\u3000中ʰ\u0301ǅ<|>"), max_size=60))
def test_any_text_of_what_cuts_words(tiny: Tokenizer, fast: GigatokenEncoder, text: str) -> None:
    assert np.array_equal(fast.encode(text), tiny.encode_array(text))


@pytest.mark.parametrize("name", NAMES)
def test_tiktokens_own_vocabularies(tiktoken_cache: Path, name: str) -> None:
    tokenizer = load_tokenizer(name)
    encoder = make_encoder(tokenizer)
    assert encoder.backend == "gigatoken"
    for text in HARD.values():
        assert np.array_equal(encoder.encode(text), tokenizer.encode_array(text))

    @settings(max_examples=150)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text: str) -> None:
        assert np.array_equal(encoder.encode(text), tokenizer.encode_array(text))

    check()


@pytest.mark.parametrize("backend", ["gigatoken", "tiktoken"])
def test_golden_ids_of_the_corpus(tiktoken_cache: Path, shared: Path, backend: str) -> None:
    import hashlib

    corpus = shared / "data/corpus"
    golden = json.loads((corpus / "TOKENS.o200k_base.json").read_bytes())["shards"]
    encoder = make_encoder(load_tokenizer("o200k_base"), backend)
    for name in ("train/04.jsonl.zst", "val.jsonl.zst"):
        with (corpus / name).open("rb") as packed:
            stream = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
            texts = [json.loads(line)["text"] for line in stream.read().splitlines()]
        digest = hashlib.sha256()
        for text in texts:
            digest.update(encoder.encode(text).astype("<u4").tobytes() + b"\x3f\x0d\x03\0")
        assert digest.hexdigest() == golden[name]["sha256_u32le"]


# ---------------------------------------------------------------- where they would differ


def test_what_tiktoken_refuses_is_refused(fast: GigatokenEncoder) -> None:
    for text in (" " * 2_000_000, "a" * 99_999 + "\u00a0" * 1_500_000 + "b"):
        with pytest.raises(UnencodableText):
            fast.encode(text)


@pytest.mark.parametrize("line", ["some words, and more\n", "no end of a line ", "x\r\n", "9;\n"])
def test_long_texts_are_encoded_in_pieces(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(encoders, "_LONG_BLANKS", 1_000)
    monkeypatch.setattr(encoders, "_PIECE", 5_000)
    monkeypatch.setattr(encoders, "_LONGEST_PIECE", 20_000)
    encoder = GigatokenEncoder(tiny)
    text = line * (300_000 // len(line))
    assert np.array_equal(encoder.encode(text), tiny.encode_array(text))


@settings(max_examples=200)
@given(st.text(st.sampled_from("ab1 \n\n\n\r/.é"), min_size=20, max_size=200))
def test_pieces_end_where_a_word_ends_anyway(tiny: Tokenizer, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "_PIECE", 10)
        pieces = list(encoders._pieces(text))
    assert "".join(pieces) == text
    joined = np.concatenate([tiny.encode_array(piece) for piece in pieces])
    assert np.array_equal(joined, tiny.encode_array(text))


def test_remembered_words_are_bounded(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that never come again: without a bound, about 10 bytes of memory a byte of text."""
    monkeypatch.setattr(encoders, "_GROWTH", 1 << 26)
    monkeypatch.setattr(encoders, "_BETWEEN", 1 << 22)
    encoder, chance = GigatokenEncoder(tiny), random.Random(0)
    process, largest = psutil.Process(), 0
    begun = process.memory_info().rss
    for _ in range(30):
        words = " ".join(f"{chance.getrandbits(48):x}z" for _ in range(75_000))
        encoder.encode(words.translate(str.maketrans("0123456789", "ghijklmnop")))
        largest = max(largest, process.memory_info().rss - begun)
    assert largest < 1 << 28


def test_a_failing_backend_hands_over_to_tiktoken(
    tiny: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(content: bytes) -> np.ndarray:
        raise RuntimeError("a bug")

    encoder = GigatokenEncoder(tiny)
    encoder._encode = broken
    assert np.array_equal(encoder.encode("some text"), tiny.encode_array("some text"))
    assert "gigatoken failed on a text (a bug); tiktoken encoded it" in capsys.readouterr().err


# ---------------------------------------------------------------- choosing


def test_auto_falls_back_loudly(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_encoder(tiny).backend == "gigatoken"
    assert make_encoder(tiny, "tiktoken").backend == "tiktoken"
    assert not capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    assert make_encoder(tiny).backend == "tiktoken"
    assert "encoding with tiktoken, gigatoken cannot be used" in capsys.readouterr().err
    with raises_error("encoder.unavailable"):
        make_encoder(tiny, "gigatoken")


def test_other_patterns_and_other_ids_are_not_for_gigatoken(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(encoders._SCHEMES, encoders.O200K_PATTERN, "gpt2")  # a wrong cut
    assert make_encoder(tiny).backend == "tiktoken"
    assert "differ from tiktoken's" in capsys.readouterr().err
    monkeypatch.delitem(encoders._SCHEMES, encoders.O200K_PATTERN)
    assert make_encoder(tiny).backend == "tiktoken"
    assert "does not support the split pattern" in capsys.readouterr().err
