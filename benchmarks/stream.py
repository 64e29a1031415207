"""The data loader: tokens per second of one process, and the share of a step spent waiting.

    python benchmarks/stream.py [--json] [--rounds N]

Batches include their distinct ids, as in training. The dataset is the standard library of the
running Python with a byte-level BPE of 8,192 entries, in samples of 512 tokens.
"""

import statistics
import time
from pathlib import Path

from harness import Report, arguments, ready
from run import run_config, scratch, world

from leviathan.config.data import PrepConfig
from leviathan.config.plan import RunPlan
from leviathan.data.loader import TrainLoader
from leviathan.data.prepare import prepare
from leviathan.data.prepare.stdlib_corpus import write_stdlib_corpus
from leviathan.data.tokenizer import train_bpe
from leviathan.engine import build_engine
from leviathan.train.loop import new_model

SEQ, GOAL = 512, 1e6  # tokens; tokens per second


def data_set(folder: Path) -> Path:
    """Prepares the dataset."""
    write_stdlib_corpus(folder / "corpus")
    shards = sorted((folder / "corpus").glob("train-*.jsonl.zst"))
    train_bpe(shards[:1], 8192, folder / "bpe.tiktoken")
    out = folder / "set"
    prepare(
        PrepConfig.model_validate(
            {
                "source": {"paths": [str(s) for s in shards]},
                "tokenizer": str(folder / "bpe.tiktoken"),
            }
            | {"seq_len": SEQ, "out": out, "workers": 2}
        )
    )
    return out


def tokens_per_second(path: Path, rows: int, steps: int) -> float:
    """Measures loading without training."""
    stream = TrainLoader(path, 1, 10_000, rows, min(rows, 8))
    stream.microbatches(0, 0, 1)
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        stream.microbatches(step, 0, 1)
    return rows * SEQ * steps / (time.perf_counter() - begin)


def waiting_share(path: Path, folder: Path, rows: int, steps: int) -> float:
    """Returns the percentage of step time that the 60M-like model waits for data."""
    config = run_config(folder, {"kind": "fsdp2"}, rows)
    engine = build_engine(lambda: new_model(config), RunPlan(config, 1), world())
    stream = TrainLoader(path, 1, 10_000, rows, rows)
    waited, begin = 0.0, 0.0
    for step in range(steps + 1):
        if step == 1:  # the first one includes startup
            waited, begin = 0.0, time.perf_counter()
        before = time.perf_counter()
        batches = stream.microbatches(step, 0, 1)
        waited += time.perf_counter() - before
        engine.train_step(batches, 1e-4)
    return 100 * waited / (time.perf_counter() - begin)


def main() -> None:
    """Command line."""
    options = arguments(__doc__ or "", rounds=5).parse_args()
    ready(options.device)
    report, folder = Report("stream", options.json), scratch()
    path = data_set(folder)
    for rows in (8, 32):
        rates = [tokens_per_second(path, rows, 2048 // rows) for _ in range(options.rounds)]
        case = f"a token, with distinct ids, {rows} rows of {SEQ}"
        report.figure(case, 1e6 / statistics.median(rates), "µs", at_most=1e6 / GOAL)
    share = waiting_share(path, folder, 4, 8)
    report.figure("waiting for data, 60m-50k, 2048 tokens a step", share, "% of time", at_most=1)


if __name__ == "__main__":
    main()
