"""`leviathan generate`: prompts side by side, the same text from the run and from its export."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from errors import raises_error

from leviathan.evaluate.generate import as_text, generate_texts, read_prompts
from leviathan.evaluate.scoring import open_checkpoint
from leviathan.hf.export import export
from leviathan.model.kv_cache import Sampling

PROMPTS = ["def wrap(text", "", "import json\nclass"]


def test_batches_and_pieces(runs: dict[str, Path]) -> None:
    pieces: dict[int, str] = dict.fromkeys(range(3), "")

    def on_text(number: int, text: str) -> None:
        pieces[number] += text

    how = Sampling(temperature=0.9, top_p=0.95, seed=11)
    result = generate_texts(runs["leviathan"], PROMPTS, 12, how, batch_size=2, on_text=on_text)
    texts = [found["text"] for found in result["completions"]]
    assert list(pieces.values()) == texts
    assert any(texts)
    alone = generate_texts(runs["leviathan"], PROMPTS, 12, how, batch_size=3)
    assert [found["text"] for found in alone["completions"]] == texts
    for found in result["completions"]:
        assert found["finish"] == ("length" if found["tokens"] == 12 else "end")
    assert as_text(result).startswith(PROMPTS[0] + texts[0])


def test_stop(runs: dict[str, Path]) -> None:
    whole = generate_texts(runs["tied"], PROMPTS[:1], 16)["completions"][0]
    middle = whole["text"][len(whole["text"]) // 2 :][:2]
    cut = generate_texts(runs["tied"], PROMPTS[:1], 16, stops=[middle])["completions"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(middle)]
    assert cut["finish"] == "stop"


def test_what_does_not_fit_is_reported(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt keeps its tokens; one that fills the context of 32 is truncated and counted."""
    encode = open_checkpoint(runs["tied"]).tokenizer.encode
    prompts = ["def wrap(text", "x = " * 40, "a"]
    result = generate_texts(runs["tied"], prompts, 100, batch_size=3)
    lengths = [1 + len(encode(prompt)) for prompt in prompts]
    first, long, last = result["completions"]
    assert (first["max_new_tokens"], first["truncated_prompt_tokens"]) == (32 - lengths[0], 0)
    assert (long["max_new_tokens"], long["truncated_prompt_tokens"]) == (16, lengths[1] - 16)
    assert result["truncation"] == {
        "contexts": 1,
        "tokens": lengths[1] - 16,
        "capped_generations": 3,
    }
    for completion in result["completions"]:
        assert completion["tokens"] <= completion["max_new_tokens"]
        assert (completion["finish"] == "length") == (
            completion["tokens"] == completion["max_new_tokens"]
        )
    printed = capsys.readouterr().err
    assert f"truncated from the left, by a total of {lengths[1] - 16:,} tokens" in printed
    assert "3 generation(s) were capped" in printed
    # A long prompt in the same batch does not shorten a short one.
    alone = generate_texts(runs["tied"], prompts[2:], 100)["completions"][0]
    assert (last["text"], last["tokens"]) == (alone["text"], alone["tokens"])
    assert not capsys.readouterr().err.count("truncated")
    fitting = generate_texts(runs["tied"], prompts[:1], 4)
    assert not any(fitting["truncation"].values())


def test_exported_folder_says_the_same(runs: dict[str, Path], tmp_path: Path) -> None:
    export(runs["leviathan"], tmp_path / "llama")
    native = generate_texts(runs["leviathan"], PROMPTS, 12)["completions"]
    assert generate_texts(tmp_path / "llama", PROMPTS, 12)["completions"] == native


def test_command(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import re"}\n"def f"\n')
    command = [sys.executable, "-m", "leviathan", "generate", str(runs["tied"]), "--prompt", "a"]
    command += ["--file", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["completions"]
    assert [entry["prompt"] for entry in found] == ["a", "import re", "def f"]


def test_requests_that_mean_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    with raises_error("generate.no_prompt", "--prompt", "--file"):
        generate_texts(runs["tied"], [])
    with raises_error("cli.invalid_option", "--top-p 0"):
        generate_texts(runs["tied"], ["a"], sampling=Sampling(1.0, 0.0))
    with raises_error("checkpoint.not_found", "nowhere"):
        generate_texts(tmp_path / "nowhere", ["a"])
    with raises_error("prompts.unreadable", "nowhere.txt"):
        read_prompts(tmp_path / "nowhere.txt")
    (tmp_path / "p.jsonl").write_text("7\n")
    with raises_error("prompts.invalid", "p.jsonl:1", "prompt"):
        read_prompts(tmp_path / "p.jsonl")
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "p.txt") == ["one", "two"]
    (tmp_path / "p.txt").write_text("a\x0cb\u2028c\r\nd\n")  # str.splitlines would make four
    assert read_prompts(tmp_path / "p.txt") == ["a\x0cb\u2028c", "d"]
    (tmp_path / "p.jsonl").write_text('"x\u2028y"\n"z"\n')
    assert read_prompts(tmp_path / "p.jsonl") == ["x\u2028y", "z"]
