"""Perplexity of a split against a plain computation over its rows."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from leviathan.checkpoint.load import load_model
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import Rows
from leviathan.data.tokenizer import load_tokenizer
from leviathan.errors import DataError
from leviathan.evaluate.perplexity import perplexity, token_bytes

CLOSE = 1e-5  # fp32 sums over about a thousand targets, in another order


def plain_nll(run: Path, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """NLL and id of every target of the validation split, one row at a time, full softmax."""
    model, config, _ = load_model(run)
    nll, ids = [], []
    rows = Rows(data / "val")
    for number in range(len(rows)):
        row = rows[number]
        tokens = torch.tensor(row.tokens[: row.n_valid].astype(np.int64))
        logits = model.logits(tokens[None, :-1])[0][:, : config.model.vocab_size]
        nll.append(F.cross_entropy(logits.double(), tokens[1:], reduction="none"))
        ids.append(tokens[1:])
    return torch.cat(nll).numpy(), torch.cat(ids).numpy()


@pytest.mark.parametrize("kind", ["tied", "leviathan"])
def test_equals_a_plain_computation(runs: dict[str, Path], tiny_dataset: Path, kind: str) -> None:
    nll, ids = plain_nll(runs[kind], tiny_dataset)
    result = perplexity(runs[kind], tiny_dataset, batch_size=5)
    info = DatasetInfo.load(tiny_dataset)
    assert result["tokens"] == len(nll) == info.split("val").tokens
    assert result["nats_per_token"] == pytest.approx(nll.mean(), rel=CLOSE)
    assert result["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-4)
    tokenizer = load_tokenizer(tiny_dataset)
    text = b"".join(tokenizer.decode_bytes(i) for i in ids if i != tokenizer.end_of_text)
    assert result["bytes"] == len(text)
    assert result["bits_per_byte"] == pytest.approx(nll.sum() / math.log(2) / len(text), rel=CLOSE)


def test_subsets_add_up(runs: dict[str, Path], tiny_dataset: Path) -> None:
    result = perplexity(runs["tied"], tiny_dataset)
    parts = result["by_subset"].values()
    assert set(result["by_subset"]) == {"classes", "functions"}
    assert sum(part["tokens"] for part in parts) == result["tokens"]
    assert sum(part["bytes"] for part in parts) == result["bytes"]
    total = sum(part["tokens"] * part["nats_per_token"] for part in parts)
    assert total / result["tokens"] == pytest.approx(result["nats_per_token"], rel=1e-9)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batch_size_changes_nothing(
    runs: dict[str, Path], tiny_dataset: Path, batch_size: int
) -> None:
    expected = perplexity(runs["leviathan"], tiny_dataset)["nats_per_token"]
    found = perplexity(runs["leviathan"], tiny_dataset, batch_size=batch_size)
    assert found["nats_per_token"] == pytest.approx(expected, rel=CLOSE)


def test_result_is_filed_beside_the_run(make_run: Callable[..., Path], tiny_dataset: Path) -> None:
    run = make_run(tiny_dataset)
    result = perplexity(run, tiny_dataset)
    filed = run / "evaluation" / "step-00000020" / "perplexity.json"
    assert json.loads(filed.read_text()) == result
    assert result["step"] == 20
    assert result["parameters"]["total"] > 0
    assert result["data"]["split"] == "val"
    # The training split is another question: its answer must not replace this one.
    perplexity(run, tiny_dataset, split="train", batch_size=64)
    assert json.loads(filed.read_text()) == result


def test_unknown_split(runs: dict[str, Path], tiny_dataset: Path) -> None:
    with pytest.raises(DataError, match="test"):
        perplexity(runs["tied"], tiny_dataset, split="test")


def test_bytes_of_tokens(tiny_dataset: Path) -> None:
    tokenizer = load_tokenizer(tiny_dataset)
    lengths = token_bytes(tokenizer)
    ids = tokenizer.encode("naïve Ωμέγα\n")
    assert lengths[ids].sum() == len("naïve Ωμέγα\n".encode())
    assert lengths[tokenizer.end_of_text] == 0
