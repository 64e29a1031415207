"""Tokenizers of Llama directories: the ids of transformers, or an error that names the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from errors import raises_error
from llama_folders import BOS, EOS, EXTRA, SHAPES, edit_json, llama3, write_tokenizer

from leviathan.data.id_comparison import comparison_texts
from leviathan.data.tokenizer import END_OF_TEXT
from leviathan.hf.tokenizer import read_llama_tokenizer

# format → names in the error; None: it is accepted
OUTCOMES: dict[str, list[str] | None] = {
    "llama3": None,
    "gpt_neox": ["normalizer", "NFC", "pre_tokenizer"],
    "qwen": ["normalizer", "NFC"],
    "smollm": ["pre_tokenizer", "Digits"],
    "llama2": ["normalizer", "model.byte_fallback"],
    "gemma": ["normalizer", "pre_tokenizer", "model.byte_fallback"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_ids_or_a_refusal_by_name(shape: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder, refusal = write_tokenizer(tmp_path, SHAPES[shape]()), OUTCOMES[shape]
    if refusal is not None:
        with raises_error("import.unsupported_tokenizer", *refusal):
            read_llama_tokenizer(folder)
        return
    tokenizer = read_llama_tokenizer(folder)
    original = AutoTokenizer.from_pretrained(folder)
    texts = list(comparison_texts())
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    assert original(texts, **options).input_ids == [tokenizer.encode(text) for text in texts]
    assert tokenizer.end_of_text == original.eos_token_id
    assert tokenizer.prefix_token == original.bos_token_id != original.eos_token_id
    assert tokenizer.vocab_size == len(original)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("good"), llama3())


Change = Callable[[dict[str, Any]], Any]


def parts(content: dict[str, Any]) -> list[dict[str, Any]]:
    return content["pre_tokenizer"]["pretokenizers"]


TOKENIZER_CHANGES: dict[str, tuple[Change, str]] = {
    "normalizer": (lambda c: c.update(normalizer={"type": "NFC"}), "normalizer"),
    "lowercase": (
        lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
        "normalizer",
    ),
    "prefix space": (
        lambda c: parts(c)[1].update(add_prefix_space=True),
        "pre_tokenizer.ByteLevel.add_prefix_space",
    ),
    "use_regex": (
        lambda c: parts(c)[1].update(use_regex=True),
        "pre_tokenizer.ByteLevel.use_regex",
    ),
    "use_regex by default": (
        lambda c: parts(c)[1].pop("use_regex"),
        "pre_tokenizer.ByteLevel.use_regex",
    ),
    "behavior": (
        lambda c: parts(c)[0].update(behavior="Removed"),
        "pre_tokenizer.Split.behavior",
    ),
    "invert": (lambda c: parts(c)[0].update(invert=True), "pre_tokenizer.Split.invert"),
    "string pattern": (
        lambda c: parts(c)[0].update(pattern={"String": " "}),
        "pre_tokenizer.Split.pattern",
    ),
    "digits": (
        lambda c: parts(c).insert(0, {"type": "Digits", "individual_digits": True}),
        "pre_tokenizer",
    ),
    "two splits": (lambda c: parts(c).insert(0, parts(c)[0]), "pre_tokenizer"),
    "dropout": (lambda c: c["model"].update(dropout=0.1), "model.dropout"),
    "byte fallback": (
        lambda c: c["model"].update(byte_fallback=True),
        "model.byte_fallback",
    ),
    "word end": (
        lambda c: c["model"].update(end_of_word_suffix="</w>"),
        "model.end_of_word_suffix",
    ),
    "subword prefix": (
        lambda c: c["model"].update(continuing_subword_prefix="##"),
        "model.continuing_subword_prefix",
    ),
    "new field": (lambda c: c["model"].update(novelty=1), "model.novelty"),
    "new component": (lambda c: c.update(novelty={}), "novelty"),
    "model": (lambda c: c["model"].update(type="Unigram"), "model.type"),
    "truncation": (lambda c: c.update(truncation={"max_length": 4}), "truncation"),
    "padding": (lambda c: c.update(padding={"strategy": "BatchLongest"}), "padding"),
    "decoder": (lambda c: c.update(decoder={"type": "Fuse"}), "decoder"),
    "ordinary added token": (
        lambda c: c["added_tokens"][2].update(special=False),
        "added_tokens[502]",
    ),
    "end in the template": (
        lambda c: c["post_processor"]["processors"][1]["single"].append(
            {"SpecialToken": {"id": EOS, "type_id": 0}}
        ),
        "post_processor.TemplateProcessing.single",
    ),
    "other post-processor": (
        lambda c: c.update(post_processor={"type": "BertProcessing", "sep": [EOS, 501]}),
        "post_processor",
    ),
    "order of merges": (
        lambda c: c["model"]["merges"].reverse(),
        "model.merges",
    ),
    "unreachable token": (
        lambda c: (c["model"]["merges"].pop(), c["model"].update(ignore_merges=False)),
        "model.merges",
    ),
    "missing byte": (
        lambda c: c["model"]["vocab"].pop("A"),
        "model.vocab",
    ),
    "no byte": (
        lambda c: c["model"]["vocab"].update({"▁x": 600}),
        "model.vocab",
    ),
}
CONFIG_CHANGES: dict[str, tuple[Change, str]] = {
    "class": (
        lambda c: c.update(tokenizer_class="LlamaTokenizer"),
        "tokenizer_class",
    ),
    "no class": (lambda c: c.pop("tokenizer_class"), "tokenizer_class"),
    "prefix space": (lambda c: c.update(add_prefix_space=True), "add_prefix_space"),
    "end added": (lambda c: c.update(add_eos_token=True), "add_eos_token"),
    "code": (lambda c: c.update(auto_map={"AutoTokenizer": "t.T"}), "auto_map"),
    "no end": (lambda c: c.pop("eos_token"), "eos_token"),
    "unknown end": (
        lambda c: c.update(eos_token="</s>"),
        "eos_token",
    ),
    "unknown beginning": (lambda c: c.update(bos_token="<s>"), "bos_token"),
    "another id": (
        lambda c: c.update(added_tokens_decoder={"7": {"content": EXTRA, "special": True}}),
        "added_tokens_decoder[7]",
    ),
    "matched in text": (
        lambda c: c.update(added_tokens_decoder={"502": {"content": EXTRA, "special": False}}),
        "added_tokens_decoder[502]",
    ),
}


@pytest.mark.parametrize("name", TOKENIZER_CHANGES)
def test_every_field_of_tokenizer_json(name: str, good: Path, tmp_path: Path) -> None:
    change, field = TOKENIZER_CHANGES[name]
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "tokenizer.json", change)
    with raises_error("import.unsupported_tokenizer", field):
        read_llama_tokenizer(tmp_path)


@pytest.mark.parametrize("name", CONFIG_CHANGES)
def test_every_key_of_tokenizer_config_json(name: str, good: Path, tmp_path: Path) -> None:
    change, key = CONFIG_CHANGES[name]
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "tokenizer_config.json", change)
    with raises_error("import.unsupported_tokenizer", key):
        read_llama_tokenizer(tmp_path)


def test_all_problems_at_once(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "tokenizer.json", TOKENIZER_CHANGES["normalizer"][0])
    edit_json(tmp_path / "tokenizer_config.json", CONFIG_CHANGES["prefix space"][0])
    with raises_error("import.unsupported_tokenizer", "normalizer", "NFC", "add_prefix_space"):
        read_llama_tokenizer(tmp_path)


def test_ids_are_the_last_proof(good: Path, tmp_path: Path) -> None:
    """A pattern that the two libraries read differently, which no check of a field can find."""
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)

    def lines(content: dict[str, Any]) -> None:
        pattern = parts(content)[0]["pattern"]
        pattern["Regex"] = r"[^\r\n]+$|" + pattern["Regex"]  # of every line, or of the last one

    edit_json(tmp_path / "tokenizer.json", lines)
    with raises_error("import.different_ids", "tokenizer.json"):
        read_llama_tokenizer(tmp_path)


def test_files_beside_it_that_disagree(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": EXTRA}))
    with raises_error("import.unsupported_tokenizer", "bos_token", "special_tokens_map.json"):
        read_llama_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": BOS}}))
    assert read_llama_tokenizer(tmp_path).prefix_token == 500
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|new|>": 503}))
    with raises_error("import.unsupported_tokenizer", "added_tokens.json", "<|new|>", 503):
        read_llama_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with raises_error("import.unreadable", "tokenizer_config.json"):
        read_llama_tokenizer(tmp_path)


def test_unknown_keys_are_reported(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "tokenizer_config.json", lambda c: c.update(novelty=1, legacy=True))
    read_llama_tokenizer(tmp_path)
    assert "unknown keys are ignored: novelty (" in capsys.readouterr().err


def test_the_end_is_the_one_that_the_configuration_names(tmp_path: Path) -> None:
    """Also where the vocabulary has a token by the usual name of end-of-text."""
    tokenizer = llama3()
    tokenizer.add_special_tokens([END_OF_TEXT])
    folder = write_tokenizer(tmp_path / "llama", tokenizer)
    read = read_llama_tokenizer(folder)
    assert read.end_of_text == tokenizer.token_to_id(EOS) == 501
    assert read.special_tokens[END_OF_TEXT] == 503
    read.save(tmp_path / "saved")
    from leviathan.data.tokenizer import load_tokenizer

    again = load_tokenizer(tmp_path / "saved")
    assert (again.end_of_text, again.fingerprint) == (501, read.fingerprint)


def test_special_strings_in_a_text_stay_text(good: Path) -> None:
    tokenizer = read_llama_tokenizer(good)
    ids = tokenizer.encode(f"a{EXTRA}{BOS}")
    assert max(ids) < 500
    assert tokenizer.decode(ids) == f"a{EXTRA}{BOS}"
