"""Perplexity of a split against a plain computation over its rows."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import raises_error

from leviathan.checkpoint.store import load_model
from leviathan.data.dataset import open_dataset
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import ShardReader
from leviathan.data.tokenizer import load_tokenizer
from leviathan.evaluate.perplexity import perplexity, token_bytes
from leviathan.evaluate.scoring import open_checkpoint, score_split

CLOSE = 1e-5  # fp32 sums over about a thousand targets, in another order


def plain_nll(run: Path, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """NLL and id of every target of the validation split, one row at a time, full softmax."""
    model, config, _ = load_model(run)
    nll, ids = [], []
    rows = ShardReader(data / "val")
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
    with raises_error("dataset.no_split"):
        perplexity(runs["tied"], tiny_dataset, split="test")


def test_bytes_of_tokens(tiny_dataset: Path) -> None:
    tokenizer = load_tokenizer(tiny_dataset)
    lengths = token_bytes(tokenizer)
    ids = tokenizer.encode("naïve Ωμέγα\n")
    assert lengths[ids].sum() == len("naïve Ωμέγα\n".encode())
    assert lengths[tokenizer.end_of_text] == 0


@pytest.mark.parametrize("stride", [5, 32])
def test_stride_scores_each_token_once_after_more_text(
    make_run: Callable[..., Path], tiny_dataset: Path, stride: int
) -> None:
    run = make_run(tiny_dataset)
    result = perplexity(run, tiny_dataset, stride=stride, batch_size=32)
    whole = perplexity(run, tiny_dataset)
    assert result["tokens"] == whole["tokens"]
    assert result["bytes"] == whole["bytes"]
    assert {name: part["tokens"] for name, part in result["by_subset"].items()} == {
        name: part["tokens"] for name, part in whole["by_subset"].items()
    }
    rows = ShardReader(tiny_dataset / "val")
    tokens = [rows[number].tokens[: rows[number].n_valid] for number in range(len(rows))]
    stream = np.concatenate([tokens[0], *(row[1:] for row in tokens[1:])]).astype(np.int64)
    model, _, _ = load_model(run)
    nats, count, length = 0.0, len(stream) - 1, 32
    for place in range(count):  # the scored target at this position, and the window that ends there
        end = length if place < length else length + -(-(place + 1 - length) // stride) * stride
        end = min(end, count)
        start = max(0, end - length)
        ids = torch.tensor(stream[start : place + 1])[None]
        logits = model.logits(ids)[0, -1, :601].double()
        nats += float(F.cross_entropy(logits, torch.tensor(stream[place + 1])))
        if place == 100:  # enough; the rest is the same
            break
    head = _first_nll(run, tiny_dataset, stride, 101)
    assert sum(head) == pytest.approx(nats, rel=CLOSE)
    filed = run / "evaluation" / "step-00000020" / f"perplexity_stride_{stride}.json"
    assert json.loads(filed.read_text()) == result


def _first_nll(run: Path, data: Path, stride: int, count: int) -> list[float]:
    """NLL of the first targets of the split, as the strided evaluation has them."""
    loaded = open_checkpoint(run)
    found: list[float] = []
    for scored in score_split(loaded, open_dataset(data), "val", 32, "", stride):
        found += scored.nll.tolist()
        if len(found) >= count:
            break
    return found[:count]


def test_stride_that_means_nothing(runs: dict[str, Path], tiny_dataset: Path) -> None:
    with raises_error("cli.invalid_option", "--stride 33", "1 to 32"):
        perplexity(runs["tied"], tiny_dataset, stride=33)
