"""Tokenizers: tiktoken's, trained ones, and invalid files."""

import base64
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import tiktoken
from errors import raises_error

from leviathan.data.tokenizer import (
    END_OF_TEXT,
    O200K_PATTERN,
    UnencodableText,
    load_tokenizer,
    train_bpe,
)

TEXTS = [
    "Hello, world!\n\n  def f(x):\n\treturn x  # ½ été 中文 🐍",
    f"a literal {END_OF_TEXT} in a text",
    "",
    " " * 500 + "x",
    "\r\nnaïve\r\n",
]


@pytest.fixture
def o200k(shared: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data/tiktoken_cache"))
    return load_tokenizer("o200k_base")


def test_trained_file_is_tiktokens_format(tiny_tokenizer: Path) -> None:
    lines = [line.split() for line in tiny_tokenizer.read_bytes().splitlines()]
    assert [int(rank) for _, rank in lines] == list(range(600))
    tokens = [base64.b64decode(token) for token, _ in lines]
    assert tokens[:256] == [bytes([byte]) for byte in range(256)]
    assert len(set(tokens)) == 600
    assert any(len(token) > 4 for token in tokens)


def test_trained_tokenizer_round_trips(tiny_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (601, 600)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids
    assert tokenizer.decode([600]) == END_OF_TEXT
    assert tokenizer.decode_bytes(65) == b"A"


def test_training_is_deterministic(tiny_corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    train_bpe([tiny_corpus], 600, tmp_path / "again.tiktoken")
    assert (tmp_path / "again.tiktoken").read_bytes() == tiny_tokenizer.read_bytes()


def test_training_describes_what_it_writes(tiny_tokenizer: Path) -> None:
    """All properties of the file are known, and its fingerprint is unchanged."""
    meta = json.loads(tiny_tokenizer.with_suffix(".meta.json").read_bytes())
    assert meta["pattern"] == O200K_PATTERN
    assert meta["special_tokens"] == {END_OF_TEXT: 600}
    digest = hashlib.sha256(tiny_tokenizer.read_bytes())
    digest.update(json.dumps([O200K_PATTERN, {END_OF_TEXT: 600}], sort_keys=True).encode())
    assert load_tokenizer(tiny_tokenizer).fingerprint == meta["fingerprint"] == digest.hexdigest()


def test_merges_are_the_frequent_ones(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "low low low lower lowest"}\n')
    train_bpe([tmp_path / "a.jsonl"], 259, tmp_path / "t.tiktoken")
    tokenizer = load_tokenizer(tmp_path / "t.tiktoken")
    assert {tokenizer.decode_bytes(id) for id in (256, 257, 258)} in (
        {b"lo", b"low", b" low"},
        {b"ow", b"low", b" low"},
    )


def test_too_little_text(
    tiny_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.tiktoken"
    with raises_error("tokenizer.too_little_text"):
        train_bpe([tiny_corpus], 1_000_000, out)
    with raises_error("tokenizer.vocab_too_small", "256"):
        train_bpe([tiny_corpus], 200, out)
    (tmp_path / "empty.jsonl").write_text("")
    with raises_error("tokenizer.too_little_text"):
        train_bpe([tmp_path / "empty.jsonl"], 300, out)
    (tmp_path / "bad.jsonl").write_text('{"txt": "x"}\n')
    with raises_error("tokenizer.too_little_text"):
        train_bpe([tmp_path / "bad.jsonl"], 300, out)
    assert "bad.jsonl:1: no key 'text'" in capsys.readouterr().err
    assert not out.exists()


def test_where_nothing_can_be_written(tiny_corpus: Path, tmp_path: Path) -> None:
    """Reported before a text is read: this corpus does not exist."""
    (tmp_path / "file").write_text("")
    for out, reason in [
        (tmp_path, ("output.not_writable",)),
        (tmp_path / "file/deep/t.tiktoken", ("output.not_writable",)),
        (Path("/proc/nowhere/t.tiktoken"), ("output.not_writable",)),
    ]:
        with raises_error(*reason):
            train_bpe([tmp_path / "nowhere"], 300, out)
    with raises_error("source.not_found"):
        train_bpe([tmp_path / "nowhere"], 300, tmp_path / "new/t.tiktoken")
    assert not (tmp_path / "new").exists()


def test_save_and_load_keep_everything(tiny_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer)
    tokenizer.save(tmp_path / "saved")
    for spec in (tmp_path / "saved", tmp_path / "saved/tokenizer.tiktoken"):
        loaded = load_tokenizer(spec)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.name == tokenizer.name
        assert loaded.special_tokens == {END_OF_TEXT: 600}


def test_what_cannot_be_loaded(tiny_tokenizer: Path, tmp_path: Path) -> None:
    with raises_error("tokenizer.not_found", "o200k_base"):
        load_tokenizer("o200k_bse")
    with raises_error("tokenizer.unreadable", "nowhere.tiktoken"):
        load_tokenizer(tmp_path / "nowhere.tiktoken")
    ranks = tiny_tokenizer.read_bytes()
    for name, content, code, named in [
        ("cut", b"".join(ranks.splitlines(True)[:200]), "tokenizer.missing_bytes", "256"),
        ("cut-line", ranks[:-2] + b"x y z\n", "tokenizer.corrupt", "cut-line.tiktoken:600"),
        ("twice", ranks + b"QQ== 700\n", "tokenizer.duplicate_id", "twice.tiktoken"),
        ("text", b"not a rank file\n", "tokenizer.corrupt", "text.tiktoken:1"),
    ]:
        (tmp_path / f"{name}.tiktoken").write_bytes(content)
        shutil.copyfile(tiny_tokenizer.with_suffix(".meta.json"), tmp_path / f"{name}.meta.json")
        with raises_error(code, named):
            load_tokenizer(tmp_path / f"{name}.tiktoken")
    folder = tmp_path / "mixed"
    load_tokenizer(tiny_tokenizer).save(folder)
    (folder / "tokenizer.tiktoken").write_bytes(ranks + b"enp6enp6eg== 600\n")
    with raises_error("tokenizer.mismatch", folder):
        load_tokenizer(folder)


def test_text_that_tiktoken_gives_up_on(tiny_tokenizer: Path) -> None:
    with pytest.raises(UnencodableText, match="tiktoken cannot encode this text"):
        load_tokenizer(tiny_tokenizer).encode(" " * 2_000_000)


def test_o200k(o200k, tmp_path: Path) -> None:
    assert (o200k.vocab_size, o200k.end_of_text) == (200_019, 199_999)
    assert o200k.pattern == O200K_PATTERN
    reference = tiktoken.get_encoding("o200k_base")
    for text in TEXTS:
        assert o200k.encode(text) == reference.encode_ordinary(text)
    o200k.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == o200k.fingerprint
    assert loaded.encode(TEXTS[0]) == o200k.encode(TEXTS[0])


@pytest.mark.parametrize(("name", "size"), [("gpt2", 50_257), ("cl100k_base", 100_277)])
def test_other_names(shared: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data/tiktoken_cache"))
    assert load_tokenizer(name).vocab_size == size


def test_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:9")
    monkeypatch.setitem(os.environ, "no_proxy", "")
    with raises_error("tokenizer.not_loaded", "TIKTOKEN_CACHE_DIR"):
        load_tokenizer("p50k_base")
