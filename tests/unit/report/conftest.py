"""Run directories like those of `leviathan train` and the evaluations, with invented numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from leviathan.evaluate.frequency_buckets import BUCKETS, SCALES, FrequencyBuckets

STEPS, LOG_EVERY, ROWS, SEQ_LEN = 200, 5, 16, 256
DATA = "da7a" * 16
MACHINE = {"machine": "Some CPU", "date": "2026-11-30"}
MakeRun = Callable[..., Path]


def write_jsonl(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_strata(offset: float, documents: int = 60) -> FrequencyBuckets:
    """Documents whose mean loss is 5 + offset nats; the offset is largest where tokens are rare."""
    random = np.random.default_rng(1)
    width = len(BUCKETS["absolute"])
    share = np.array([2, 9, 30, 70, 110, 130, 60, 0])
    tokens = random.poisson(share, (documents, width))
    loss = np.linspace(10, 2.5, width) + random.normal(0, 0.4, (documents, width))
    own = np.random.default_rng(int(1e4 * abs(offset)))
    loss += offset * np.linspace(12, -6, width) + own.normal(0, 0.15, (documents, width))
    nats: Any = tokens * loss
    nats = nats + tokens * (5 + offset - nats.sum() / tokens.sum())
    return FrequencyBuckets(
        np.arange(documents),
        dict.fromkeys(SCALES, nats),
        dict.fromkeys(SCALES, tokens),
        f"val of {DATA}",
    )


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes a run directory and returns it."""

    def make(
        name: str,
        kind: str = "tied",
        offset: float = 0.0,
        data: str = DATA,
        evaluated: bool = True,
        **changes: Any,
    ) -> Path:
        run = tmp_path / name
        checkpoint = run / "checkpoints" / f"step-{STEPS:08d}"
        evaluation = run / "evaluation" / f"step-{STEPS:08d}"
        checkpoint.mkdir(parents=True)
        embedding = {"kind": kind} | ({"d_seed": 32} if kind == "leviathan" else {})
        config = {
            "run_dir": str(run),
            "seed": changes.get("seed", 1234),
            "data": {"path": "quickstart/data", "shuffle_window": 10_000},
            "model": {"d_model": 128, "seq_len": SEQ_LEN, "embedding": embedding},
            "train": {"steps": changes.get("steps", STEPS), "global_batch_size": ROWS},
        }
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        (run / "run.json").write_text(
            json.dumps({"world_size": 2, "data_fingerprint": data} | MACHINE)
        )
        write_jsonl(run / "metrics.jsonl", metrics(offset))
        (checkpoint / "state.json").write_text(json.dumps({"step": STEPS}))
        (checkpoint / "tokenizer.meta.json").write_text(
            json.dumps({"fingerprint": changes.get("tokenizer", "70ce" * 16)})
        )
        (checkpoint / "manifest.json").write_text("{}")
        if evaluated:
            evaluation.mkdir(parents=True)
            evaluate(evaluation, offset, data, kind)
        return run

    return make


def metrics(offset: float) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    noise = np.random.default_rng(3).normal(0, 0.08, STEPS + 1)
    for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY):
        loss = 4.9 + 4.1 * np.exp(-step / 45) + noise[step] + offset * step / STEPS
        records.append(
            {
                "step": step,
                "tokens": step * ROWS * SEQ_LEN,
                "loss": float(loss),
                "grad_norm": 1.0,
                "lr": 1e-3,
                "tokens_per_s": 9_000.0 if offset == 0 else 7_500.0,
                "skipped": 0,
            }
        )
        if step % 50 == 0:
            records.append({"step": step, "val_loss": 4.95 + 4.1 * np.exp(-step / 45) + offset})
    return records


def evaluate(folder: Path, offset: float, data: str, kind: str) -> None:
    loss = 5.0 + offset
    subsets = {"sources": loss - 0.4, "documentation": loss + 0.6}
    (folder / "perplexity.json").write_text(
        json.dumps(
            {
                "nats_per_token": loss,
                "perplexity": float(np.exp(loss)),
                "bits_per_byte": loss / 3,
                "tokens": 50_000,
                "by_subset": {
                    name: {"nats_per_token": value, "tokens": 25_000}
                    for name, value in subsets.items()
                },
                "data": {"fingerprint": data, "split": "val"},
                "parameters": {
                    "kind": kind,
                    "total": 2_105_728 if kind == "tied" else 2_137_344,
                    "input_embedding": 0 if kind == "tied" else 31_616,
                    "output_head": 1_056_768,
                    "body": 1_048_960,
                    "flops_per_token": 12_000_000,
                },
            }
        )
    )
    results = {
        "next_line": {"alias": "next_line", "acc,none": 0.41 - offset, "acc_stderr,none": 0.049}
    }
    samples = {"next_line": {"original": 100, "effective": 100}}
    (folder / "lm_eval.json").write_text(json.dumps({"results": results, "n-samples": samples}))
    make_strata(offset).save(folder / "frequency.npz")
