"""Compares log-likelihood requests on a native checkpoint with lm-eval's HFLM on its export.

python benchmarks/eval.py [--json] [--rounds N] [--device cuda]

The same samples in the same order, with the same batch size; the log-likelihoods must agree.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
from harness import Report, arguments, paired, ready, shared_data
from hflm import hugging_face_model
from lm_eval.api.instance import Instance

from leviathan.config.run import ModelConfig
from leviathan.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from leviathan.evaluate.harness.model import LeviathanLM
from leviathan.hf.export import export_model
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM

BATCH = 8
ITEMS = 25  # per task
SHAPES = {"cpu": (256, 6, 4), "cuda": (1024, 12, 16)}
CLOSE = 2e-3  # nats per request; fp32 with different kernels
Pairs = list[tuple[str, str]]


def requests() -> dict[str, Pairs]:
    """(context, continuation) pairs by task: real samples, or generated ones."""
    folder = shared_data()
    if folder is None:
        text = "It rained this morning, so the road is wet and the river is high. "
        made = [(text * (1 + number % 9), f" Number {number}.") for number in range(4 * ITEMS)]
        return {"made-up text": made}

    def rows(name: str) -> list[dict]:
        lines = (folder / "eval" / f"{name}.sample.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[:ITEMS]]

    return {
        "hellaswag": [
            (f"{row['activity_label']}: {row['ctx']}", f" {ending}")
            for row in rows("hellaswag_validation")
            for ending in row["endings"]
        ],
        "arc_easy": [
            (f"Question: {row['question']}\nAnswer:", f" {choice}")
            for row in rows("arc_easy_test")
            for choice in row["choices"]["text"]
        ],
        "lambada_openai": [
            (" ".join(row["text"].split(" ")[:-1]), " " + row["text"].split(" ")[-1])
            for row in rows("lambada_openai_test")
        ],
    }


def tokenizer(scratch: Path) -> Tokenizer:
    """o200k_base if available, else 8,192 entries trained on the standard library."""
    folder = shared_data()
    if folder is not None:
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(folder / "tiktoken_cache"))
        return load_tokenizer("o200k_base")
    lines = (
        json.dumps({"text": path.read_text()}) for path in Path(os.__file__).parent.glob("*.py")
    )
    (scratch / "text.jsonl").write_text("\n".join(lines))
    train_bpe([scratch / "text.jsonl"], 8_192, scratch / "bpe.tiktoken")
    return load_tokenizer(scratch / "bpe.tiktoken")


def measure(report: Report, rounds: int, device: torch.device, scratch: Path) -> None:
    """Runs the requests of each task with both."""
    vocabulary = tokenizer(scratch)
    width, layers, heads = SHAPES[device.type]
    config = ModelConfig.model_validate(
        {"d_model": width, "n_layers": layers, "n_heads": heads, "embedding": {"kind": "leviathan"}}
        | {"vocab_size": vocabulary.vocab_size, "init_std": 0.05}
    )
    model = CausalLM(config)
    init_weights(model, config, seed=0)
    export_model(model, config, vocabulary, {}, scratch / "llama", add_bos=True)
    ours = LeviathanLM(model.to(device), vocabulary, BATCH)
    theirs = hugging_face_model(scratch / "llama", str(device), BATCH)
    for task, pairs in requests().items():
        instances = [
            Instance("loglikelihood", {}, pair, number, (task, number, 1))
            for number, pair in enumerate(pairs)
        ]
        found = (ours.loglikelihood(instances), theirs.loglikelihood(instances, disable_tqdm=True))
        worst = max(abs(mine - other) for (mine, _), (other, _) in zip(*found, strict=True))
        assert worst < CLOSE, f"{task}: log-likelihoods differ by {worst}"
        timed = paired(
            lambda i=instances: ours.loglikelihood(i),
            lambda i=instances: theirs.loglikelihood(i, disable_tqdm=True),
            rounds,
            device,
            warm=False,
        )
        case = f"{task}: {len(pairs)} requests"
        report.compare(case, timed, "lm-eval's HFLM on the export", "s", "≥ 1.0")
        median = sorted(mine for mine, _ in timed)[len(timed) // 2]
        report.figure(case, len(pairs) / median, "requests/s")


def main() -> None:
    """Command line."""
    options = arguments((__doc__ or "").split("\n\n")[0], rounds=3).parse_args()
    device = ready(options.device)
    with tempfile.TemporaryDirectory() as scratch:
        measure(Report("eval", options.json), options.rounds, device, Path(scratch))


if __name__ == "__main__":
    main()
