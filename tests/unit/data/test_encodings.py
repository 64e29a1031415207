"""Published encodings are known without a download, and exactly as tiktoken has them."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken_ext.openai_public as openai_public
from errors import raises_error

import leviathan.data.tokenizer as encodings
from leviathan.data.comparison_texts import FIXED_TEXTS
from leviathan.data.tokenizer import (
    END_OF_TEXT,
    PUBLISHED,
    R50K_PATTERN,
    PublishedEncoding,
    load_tokenizer,
)
from leviathan.errors import DataError


def test_the_table_is_tiktokens(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes: dict[str, str] = {}

    def no_download(url: str, expected_hash: str) -> dict[bytes, int]:
        hashes[url.rpartition("/")[2].removesuffix(".tiktoken")] = expected_hash
        return {}

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", no_download)
    for known in PUBLISHED:
        theirs: dict[str, Any] = openai_public.ENCODING_CONSTRUCTORS[known.name]()
        assert known.pattern == theirs["pat_str"]
        assert known.special_tokens == theirs["special_tokens"]
        assert known.ranks_sha256 == hashes[known.name]
    # Encodings with the same ranks give the same ids.
    for name, base in (("p50k_edit", "p50k_base"), ("o200k_harmony", "o200k_base")):
        theirs = openai_public.ENCODING_CONSTRUCTORS[name]()
        known = next(one for one in PUBLISHED if one.name == base)
        assert theirs["pat_str"] == known.pattern
        assert theirs["special_tokens"].items() >= known.special_tokens.items()


def rank_file(tmp_path: Path, *merges: bytes) -> Path:
    """A bare file, as other programs write it."""
    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    path = tmp_path / "bare.tiktoken"
    path.write_bytes(b"".join(lines))
    return path


def test_a_published_file_gets_its_own_pattern_and_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rank_file(tmp_path, b"12", b"34", b"1234")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    special = {END_OF_TEXT: 300, "<|fim|>": 301}
    known = PublishedEncoding("small_base", R50K_PATTERN, special, digest)
    monkeypatch.setattr(encodings, "PUBLISHED", (known,))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.name, tokenizer.end_of_text) == ("small_base", 300)
    assert (tokenizer.vocab_size, tokenizer.special_tokens) == (302, special)
    assert tokenizer.encode("1234") == [258]  # o200k's pattern splits digits by threes


def test_any_other_file_is_refused_with_what_to_write(tmp_path: Path) -> None:
    path = rank_file(tmp_path, b"ab")
    with pytest.raises(DataError) as error:
        load_tokenizer(path)
    message = str(error.value)
    for name in ("bare.tiktoken", "bare.meta.json", "`name`", "`pattern`", "`special_tokens`"):
        assert name in message
    (tmp_path / "bare.meta.json").write_text(message[message.index('{"name"') :])
    tokenizer = load_tokenizer(path)
    assert (tokenizer.end_of_text, tokenizer.pattern) == (257, encodings.O200K_PATTERN)


META: dict[str, Any] = {
    "name": "a",
    "pattern": r"\S+|\s+",
    "special_tokens": {END_OF_TEXT: 257, "<|x|>": 258},
}


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (META | {"patern": "x"}, ("tokenizer.unknown_key", "patern")),
        ({"name": "a", "pattern": "x"}, ("tokenizer.corrupt", "special_tokens")),
        (META | {"pattern": "("}, ("tokenizer.invalid",)),
        (META | {"pattern": "[a-z]+"}, ("tokenizer.loses_text",)),
        (META | {"pattern": "x*"}, ("tokenizer.loses_text",)),
        (META | {"pattern": 7}, ("tokenizer.corrupt",)),
        (META | {"special_tokens": {"<|x|>": 257}}, ("tokenizer.no_end_of_text", "<|endoftext|>")),
        (META | {"special_tokens": {END_OF_TEXT: "257"}}, ("tokenizer.corrupt",)),
        (META | {"special_tokens": {END_OF_TEXT: -1}}, ("tokenizer.corrupt",)),
        (
            META | {"special_tokens": {END_OF_TEXT: 5}},
            ("tokenizer.duplicate_id",),
        ),
        (META | {"end_of_text": 259}, ("tokenizer.corrupt", "end_of_text", "259")),
        (META | {"fingerprint": "0" * 64}, ("tokenizer.mismatch",)),
        ([META], ("tokenizer.corrupt", "JSON")),
    ],
)
def test_descriptions_that_cannot_be_used(tmp_path: Path, meta: Any, message: str) -> None:
    path = rank_file(tmp_path, b"ab")
    (tmp_path / "bare.meta.json").write_text(json.dumps(meta))
    with raises_error(*message):
        load_tokenizer(path)


def test_a_description_written_by_hand(tmp_path: Path) -> None:
    path = rank_file(tmp_path, b"ab")
    (tmp_path / "bare.meta.json").write_text(json.dumps(META | {"end_of_text": 258}))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.end_of_text, tokenizer.prefix_token) == (258, 258)
    assert tokenizer.encode("ab ab") == [256, 32, 256]
    assert [tokenizer.decode_bytes(id) for id in (256, 257, 4_000)] == [
        b"ab",
        b"<|endoftext|>",
        b"",
    ]


@pytest.mark.parametrize(("name", "end"), [("cl100k_base", 100_257), ("o200k_base", 199_999)])
def test_real_files(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: int
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data/tiktoken_cache"))
    own = load_tokenizer(name)
    (tmp_path / "bare.tiktoken").write_bytes(own.rank_file)
    bare = load_tokenizer(tmp_path / "bare.tiktoken")
    assert (bare.fingerprint, bare.end_of_text) == (own.fingerprint, end)
    assert [bare.encode(text) for text in FIXED_TEXTS] == [own.encode(text) for text in FIXED_TEXTS]
