"""A small data set of words that repeat, made by the program itself."""

import json
import random

import pytest

from leviathan.config.schema import PrepConfig


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """Folder of a prepared data set: 300 ids, rows of 32 tokens, both splits."""
    from leviathan.data.prepare.pipeline import prepare
    from leviathan.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(1)
    for name, documents in (("train", 150), ("heldout", 12)):
        lines = [
            json.dumps({"text": " ".join(words.choices("a tale of two cities and seas".split(), k=60))})
            for _ in range(documents)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = folder / "small.tiktoken"
    train_bpe([folder / "train.jsonl"], 260, tokenizer)
    prepare(
        PrepConfig.model_validate(
            {
                "source": {"paths": [str(folder / "train.jsonl")]},
                "validation": {"paths": [str(folder / "heldout.jsonl")]},
                "tokenizer": str(tokenizer),
                "seq_len": 32,
                "out": str(folder / "data"),
            }
        )
    )
    return folder / "data"
