"""Import and export again: the tokenizer that comes out is the one that went in."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from errors import raises_error
from llama_folders import (
    BOS,
    EOS,
    EXTRA,
    SHAPES,
    edit_json,
    llama3,
    write_llama_folder,
)

from leviathan.checkpoint.describe import checkpoint_info, list_checkpoints
from leviathan.checkpoint.layout import read_manifest
from leviathan.checkpoint.store import resolve_valid
from leviathan.data.comparison_texts import FIXED_TEXTS
from leviathan.data.tokenizer import load_tokenizer
from leviathan.evaluate.scoring import open_checkpoint
from leviathan.hf.export import export
from leviathan.hf.importer import import_llama

SPECIAL_TEXTS = [
    f"{BOS}user{EXTRA}\n\nHello{EOS}",
    f"a {EXTRA} b{EXTRA}{EXTRA}",
    f"def f():{EOS}{BOS}",
    f"{EOS[:-1]} {EOS}>",
]


def ids(folder: Path, **options: Any) -> list[list[int]]:
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(folder)
    return fast([*SPECIAL_TEXTS, *FIXED_TEXTS], **options).input_ids


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More rows than the tokenizer has ids, a chat template, and ids for several ends."""
    folder = write_llama_folder(
        tmp_path_factory.mktemp("source") / "llama",
        llama3(),
        vocab_size=512,
        pad_token=EXTRA,
        chat_template="{{ messages }}",
        model_max_length=64,
    )
    generation = {"bos_token_id": 500, "eos_token_id": [501, 502], "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation | {"do_sample": True}))
    edit_json(folder / "config.json", lambda c: c.update(eos_token_id=[501, 502]))
    return folder


@pytest.fixture(scope="module")
def run_dir(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("imported") / "run"
    result = import_llama(source, run_dir)
    assert result["texts_compared"] > 1_000
    return run_dir


def test_the_exported_tokenizer_is_the_imported_one(
    source: Path, run_dir: Path, tmp_path: Path
) -> None:
    assert export(run_dir, tmp_path / "out", verify=True)["max_abs_difference"] <= 1e-4
    for options in ({}, {"add_special_tokens": False}, {"split_special_tokens": True}):
        assert ids(tmp_path / "out", **options) == ids(source, **options)
    # Special tokens are split out of a text, as they were.
    assert 502 in ids(tmp_path / "out")[0]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    )
    for key in ("bos_token_id", "eos_token_id", "vocab_size", "rope_theta", "rms_norm_eps"):
        assert after[key] == before[key]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "should be preceded by the id 500" in card
    assert "`split_special_tokens=True` to encode them as ordinary text" in card
    # And it can be imported once more.
    import_llama(tmp_path / "out", tmp_path / "again")
    one, two = (open_checkpoint(path).tokenizer for path in (run_dir, tmp_path / "again"))
    assert (one.fingerprint, one.prefix_token, one.end_of_text) == (
        two.fingerprint,
        two.prefix_token,
        two.end_of_text,
    )
    assert one.prefix_token == 500


def test_an_imported_checkpoint_is_described_without_a_training(
    run_dir: Path, tmp_path: Path
) -> None:
    (info,) = list_checkpoints(run_dir).values()
    assert (info["step"], info["optimizer_steps"], info["engine"]) == (0, 0, "imported")
    assert checkpoint_info(resolve_valid(run_dir)) == info
    export(run_dir, tmp_path / "out")
    facts = json.loads((tmp_path / "out/export.json").read_text())["facts"]
    assert facts.keys() == {"Tokenizer", "Context in tokens", "Imported from"}
    card = (tmp_path / "out/README.md").read_text()
    for word in ("AdamW", "Seed", "Training", "in training", "The trained model has"):
        assert word not in card, word


def test_weights_that_are_not_finite_are_refused(source: Path, tmp_path: Path) -> None:
    corrupt = changed_weights(
        source, tmp_path / "nan", lambda w: w["model.norm.weight"].fill_(math.nan)
    )
    with raises_error("checkpoint.not_finite", "model.norm.weight"):
        import_llama(corrupt, tmp_path / "run")
    with raises_error("checkpoint.not_finite", "model.norm.weight"):
        open_checkpoint(corrupt).load()
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_two_rope_thetas_and_a_head_that_is_not_tied_are_refused(
    source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "two"
    shutil.copytree(source, folder)
    edit_json(
        folder / "config.json",
        lambda c: c.update(rope_theta=1e4, rope_parameters={"rope_theta": 5e5}),
    )
    with raises_error(
        "import.unsupported_config", "rope_theta", "10000.0", "rope_parameters", "50"
    ):
        import_llama(folder, tmp_path / "run")

    def untie(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1

    folder = changed_weights(source, tmp_path / "tied", untie)
    edit_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=True))
    with raises_error("import.contradictory_weights", "lm_head.weight", "model.embed_tokens"):
        import_llama(folder, tmp_path / "run")


def changed_weights(source: Path, folder: Path, change: Any) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_kept_files_are_in_the_manifest(run_dir: Path) -> None:
    listed = read_manifest(resolve_valid(run_dir))
    kept = {name for name in listed if name.startswith("imported_tokenizer/")}
    assert {"imported_tokenizer/tokenizer.json", "imported_tokenizer/tokenizer_config.json"} <= kept


def test_data_prepared_with_it_begins_with_its_end(run_dir: Path, tmp_path: Path) -> None:
    """Bos belongs to the imported model's training; on our own rows documents follow an end."""
    load_tokenizer(resolve_valid(run_dir)).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.prefix_token == tokenizer.end_of_text == 501


def test_a_prefix_cannot_be_added_to_it(run_dir: Path, tmp_path: Path) -> None:
    with raises_error("export.imported_tokenizer", "--add-bos", run_dir):
        export(run_dir, tmp_path / "out", add_bos=True)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_an_earlier_import_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from leviathan.checkpoint.layout import file_names, fingerprint, write_manifest

    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    shutil.rmtree(checkpoint / "imported_tokenizer")
    edit_json(checkpoint / "state.json", lambda c: c.pop("prefix_token"))
    write_manifest(checkpoint, fingerprint(checkpoint, file_names(checkpoint)))
    tokenizer = open_checkpoint(tmp_path).tokenizer
    assert tokenizer.prefix_token == tokenizer.end_of_text == 501
    assert "imported by an earlier version" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "llama3"])
def test_nothing_is_written_for_a_tokenizer_that_is_refused(shape: str, tmp_path: Path) -> None:
    folder = write_llama_folder(tmp_path / "llama", SHAPES[shape]())
    with raises_error("import.unsupported_tokenizer", "tokenizer.json"):
        import_llama(folder, tmp_path / "run")
    with raises_error("import.unsupported_tokenizer", "tokenizer.json"):
        open_checkpoint(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_what_transformers_makes_of_it_counts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that this project treats as harmless, but that changes ids in transformers."""
    import leviathan.hf.tokenizer as reader

    shutil.copytree(source, tmp_path / "llama")
    edit_json(tmp_path / "llama" / "tokenizer_config.json", lambda c: c.update(novelty=True))
    from transformers import PreTrainedTokenizerFast

    load = PreTrainedTokenizerFast.from_pretrained.__func__

    def lowered(cls: Any, folder: Any, **options: Any) -> Any:
        from tokenizers import normalizers

        fast = load(cls, folder, **options)
        if getattr(fast, "init_kwargs", {}).get("novelty"):
            fast.backend_tokenizer.normalizer = normalizers.Lowercase()
        return fast

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", classmethod(lowered))
    assert reader.read_llama_tokenizer(tmp_path / "llama").vocab_size == 503
    with raises_error("import.failed"):
        import_llama(tmp_path / "llama", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_given_folders(shared: Path, tiny_dataset: Path, tmp_path: Path) -> None:
    """A normalizer is refused by name everywhere; the same folder without it is accepted."""
    from leviathan.evaluate.harness.model import run_tasks
    from leviathan.evaluate.perplexity import perplexity

    folders = shared / "data/broken/formats/llama_folders"
    if not folders.is_dir():
        pytest.skip("no such folders")
    item = {"context": "import re\n", "choices": ["import json", "pass"], "answer": 0}
    (tmp_path / "choices.jsonl").write_text(json.dumps(item) + "\n")
    for use in (
        lambda folder: import_llama(folder, tmp_path / "nfc"),
        lambda folder: run_tasks(folder, ["next_line"], tmp_path),
        lambda folder: perplexity(folder, tiny_dataset),
    ):
        with raises_error("import.unsupported_tokenizer", "NFC"):
            use(folders / "nfc")
    import_llama(folders / "plain", tmp_path / "plain")
    for path in (folders / "plain", tmp_path / "plain"):
        assert run_tasks(path, ["next_line"], tmp_path)["n-samples"]["next_line"]["effective"] == 1
    with raises_error("data.vocab_size_mismatch"):  # no text was prepared with its vocabulary
        perplexity(folders / "plain", tiny_dataset)
