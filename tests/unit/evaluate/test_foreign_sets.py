"""Perplexity and frequency strata on a dataset that another converter wrote."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
import yaml
from errors import raises_error

from leviathan.checkpoint.layout import file_names, fingerprint, write_manifest
from leviathan.data.dataset import open_dataset
from leviathan.evaluate.frequency import frequency
from leviathan.evaluate.perplexity import perplexity
from leviathan.evaluate.scoring import open_checkpoint, score_split

ROWS = 60


@pytest.fixture
def foreign(make_run: Any, tiny_dataset: Path, tiny_tokenizer: Path, tmp_path: Path) -> Any:
    """A run on rows of the tiny dataset, rewritten as one column of plain bytes."""
    run, folder, own = make_run(tiny_dataset), tmp_path / "foreign", open_dataset(tiny_dataset)
    for split in ("train", "val"):
        rows = own.rows(split)
        with streaming.MDSWriter(out=str(folder / split), columns={"tokens": "bytes"}) as writer:
            for number in range(ROWS):
                writer.write({"tokens": rows[number].tokens.astype(np.int32).tobytes()})
    tokenizer = tmp_path / "moved_away_later.tiktoken"
    shutil.copyfile(tiny_tokenizer, tokenizer)
    form = {"kind": "mds_tokens", "tokenizer": str(tokenizer), "dtype": "int32"}
    checkpoint = run / "checkpoints" / "step-00000020"
    config = yaml.safe_load((checkpoint / "config.yaml").read_text())
    config["data"] = {"path": str(folder), "format": form}
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(config))
    names = [name for name in file_names(checkpoint) if name != "manifest.json"]
    write_manifest(checkpoint, fingerprint(checkpoint, names))
    tokenizer.unlink()
    return run, folder


def test_equals_the_same_rows_of_our_own(foreign: Any, tiny_dataset: Path) -> None:
    run, folder = foreign
    loaded = open_checkpoint(run)
    scores = score_split(loaded, open_dataset(tiny_dataset), "val", 5, "")
    rows = [next(scores).nll for _ in range(ROWS // 5)]
    found = perplexity(run, folder)
    assert found["tokens"] == ROWS * 32
    assert found["nats_per_token"] == pytest.approx(np.concatenate(rows).mean(), rel=1e-6)
    assert found["bits_per_byte"] > 0


def test_counts_are_made_once(foreign: Any, tiny_dataset: Path) -> None:
    run, folder = foreign
    found = frequency([run], folder, split="val", batch_size=16)
    rows = open_dataset(tiny_dataset).rows("train")
    ids = np.concatenate([rows[number].tokens for number in range(ROWS)])
    (kept,) = (run / "evaluation").glob("token_counts-*.npy")
    assert np.load(kept).tolist() == np.bincount(ids, minlength=601).tolist()
    before = kept.stat().st_mtime_ns
    again = frequency([run], folder, split="train")
    assert kept.stat().st_mtime_ns == before
    assert again["runs"][0]["nats_per_token"] != found["runs"][0]["nats_per_token"]
    json.dumps(again)


def test_what_cannot_be_scored(foreign: Any, make_run: Any, tiny_dataset: Path) -> None:
    run, folder = foreign
    shutil.rmtree(folder / "val")
    with raises_error("dataset.no_split"):
        perplexity(run, folder)
    with raises_error("dataset.not_found", "dataset.json"):  # no format is known for it
        perplexity(make_run(tiny_dataset, name="other"), folder)
