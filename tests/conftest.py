"""Fixtures of all tests: a small prepared dataset, and real data if available."""

import inspect
import json
import os
import textwrap
from pathlib import Path

import pytest
from hypothesis import settings

from leviathan.config.data import PrepConfig
from leviathan.data.prepare import prepare
from leviathan.data.tokenizer import train_bpe

REPOSITORY = Path(__file__).parent.parent
settings.register_profile("tests", deadline=None)  # a busy machine is slower
settings.load_profile("tests")
VOCABULARY = 600  # entries of the tiny tokenizer; its vocab_size is one more


@pytest.fixture(scope="session")
def shared() -> Path:
    """Directory of real data: $LEVIATHAN_SHARED, or `shared` next to the repository; else skips."""
    folder = Path(os.environ.get("LEVIATHAN_SHARED", REPOSITORY.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("no shared data: set LEVIATHAN_SHARED")
    return folder


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two small Pile-format shards of real text, in two subsets."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, modules in enumerate([(textwrap, json.decoder), (inspect, json.encoder)]):
        lines = []
        for module in modules:
            source = inspect.getsource(module)
            for part in source.split("\n\n\n"):
                subset = "classes" if part.startswith("class") else "functions"
                lines.append(json.dumps({"text": part, "meta": {"pile_set_name": subset}}))
        (folder / f"{number:02}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `.tiktoken` file of 600 entries trained on `tiny_corpus` (vocab_size 601)."""
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.tiktoken"
    train_bpe([tiny_corpus], VOCABULARY, path)
    return path


@pytest.fixture(scope="session")
def tiny_dataset(
    tiny_corpus: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A prepared dataset: vocab_size 601, seq_len 32, about 1,500 training rows, a val split.

    Read-only: a test that damages it copies it first.
    """
    out = tmp_path_factory.mktemp("dataset") / "tiny"
    prepare(
        PrepConfig.model_validate(
            {
                "source": {"paths": [str(tiny_corpus)]},
                "validation": {"fraction": 0.1},
                "tokenizer": str(tiny_tokenizer),
                "seq_len": 32,
                "out": out,
            }
        )
    )
    return out
