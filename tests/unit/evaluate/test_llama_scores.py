"""Llama directories whose bos is not eos: scores and text start from bos, as in lm-eval's `hf`."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from errors import raises_error
from llama_folders import edit_json, llama3, write_llama_folder
from lm_eval.api.instance import Instance

from leviathan.evaluate.generate import generate_texts
from leviathan.evaluate.harness.model import LeviathanLM
from leviathan.evaluate.scoring import open_checkpoint
from leviathan.hf.importer import import_llama

TOLERANCE = 1e-4  # nats a request, fp32, other kernels
WINDOW = 64
PAIRS = [
    ("def wrap(text,", " width=70):"),
    ("", "import re"),
    ("import json\n" * 20, "import re"),
    ("    for line in lines:\n", "        yield line"),
    ("caf\u00e9 cafe\u0301 ", "1234567"),
]
TEXTS = ["import re", "def wrap(text):\n    return text\n" * 12]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=i, metadata=("task", i, 1))  # pyright: ignore
        for i, args in enumerate(arguments)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama_folder(tmp_path_factory.mktemp("llama") / "bos", llama3(), WINDOW)


@pytest.fixture(scope="module")
def imported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("imported") / "run"
    import_llama(folder, run_dir)
    return run_dir


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=1)


@pytest.mark.parametrize("path", ["folder", "imported"])
def test_scores_are_those_of_lm_evals_own_model(
    path: str, theirs: Any, request: pytest.FixtureRequest
) -> None:
    loaded = open_checkpoint(request.getfixturevalue(path))
    assert loaded.tokenizer.prefix_token == theirs.prefix_token_id != loaded.tokenizer.end_of_text
    ours = LeviathanLM(loaded.model, loaded.tokenizer, 4)
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id

    pairs = requests("loglikelihood", PAIRS)
    for (own, greedy), (other, other_greedy) in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True), strict=True
    ):
        assert own == pytest.approx(other, abs=TOLERANCE)
        assert greedy == other_greedy
    # lm-eval adds the prefix before a full text; that of the tokenizer would be a second one.
    theirs.add_bos_token = False
    try:
        texts = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
        others = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    finally:
        theirs.add_bos_token = None
    assert ours.loglikelihood_rolling(texts) == pytest.approx(others, abs=TOLERANCE * WINDOW)


@pytest.mark.parametrize("path", ["folder", "imported"])
def test_generation_starts_from_bos_and_ends_at_eos(
    path: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = generate_texts(request.getfixturevalue(path), ["def wrap", ""], 16)["completions"]
    llama, fast = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    for completion in found:
        ids = fast(completion["prompt"], return_tensors="pt").input_ids
        assert ids[0, 0] == fast.bos_token_id
        written = llama.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
        ended = written.tolist().index(501) if 501 in written else len(written)
        assert completion["text"] == fast.decode(written[:ended])


def test_special_ids_of_the_model_that_differ_are_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", lambda c: c.update(novelty=1))
    edit_json(tmp_path / "generation_config.json", lambda c: c.update(eos_token_id=[501, 502]))
    open_checkpoint(tmp_path)
    printed = capsys.readouterr().err
    assert "config.json: unknown keys are ignored: novelty" in printed
    assert (
        "generation_config.json: eos_token_id is [501, 502], but the tokenizer has 501" in printed
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", ["LlamaForSequenceClassification"], ("import.unsupported_config",)),
        ("auto_map", {"AutoModel": "m.M"}, ("import.unsupported_config", "auto_map")),
        ("hidden_act", "gelu", ("import.unsupported_config", "hidden_act", "gelu")),
        (
            "rope_parameters",
            {"rope_type": "yarn", "factor": 2.0},
            ("import.unsupported_config", "rope_parameters"),
        ),
        (
            "rope_parameters",
            {"rope_type": "default", "factor": 2.0},
            ("import.unsupported_config", "rope_parameters"),
        ),
        ("vocab_size", 400, ("import.tokenizer_mismatch", "503", "400")),
    ],
)
def test_models_that_are_not_these(
    folder: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    shutil.copytree(folder, tmp_path / "llama")
    edit_json(tmp_path / "llama" / "config.json", lambda c: c.update({key: value}))
    for read in (open_checkpoint, lambda path: import_llama(path, tmp_path / "run")):
        with raises_error(*message):
            read(tmp_path / "llama")
    assert not (tmp_path / "run").exists()
