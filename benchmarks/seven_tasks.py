"""lm-eval's seven tasks: our harness on a native checkpoint, HFLM on its export.

python benchmarks/seven_tasks.py CKPT --task-data DIR [--tasks a,b] [--limit N] [--json]

Exports the checkpoint, runs every sample three times (native, the export with our harness, the
export with lm-eval's HFLM) and prints each metric of both sides and, per task, the largest
difference of a log-likelihood. Does not access the network.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from harness import Report
from hflm import hugging_face_model

from leviathan.console import say
from leviathan.evaluate.harness.model import BUILTIN, LeviathanLM, evaluate_model
from leviathan.evaluate.harness.tasks import RECORDS, definitions
from leviathan.evaluate.scoring import open_checkpoint
from leviathan.hf.export import export

Samples = dict[str, list[Any]]
ROLLING = "wikitext"
# fp32 sums over V logits in different kernels; a full document has thousands of tokens.
SAMPLE_TOLERANCE = 2e-3
DOCUMENT_TOLERANCE = 0.1  # nats, out of several thousand
METRIC_TOLERANCE = 1e-9  # of an accuracy: no sample may change
RELATIVE_TOLERANCE = 1e-4  # of a perplexity


def native(path: Path, tasks: list[str], own: dict[str, str], options: argparse.Namespace) -> Any:
    """Returns results and samples of our harness."""
    loaded = open_checkpoint(path)
    model = LeviathanLM(loaded.model, loaded.tokenizer, options.batch_size)
    return evaluate_model(model, tasks, own, local=True, limit=options.limit)


def lm_evals(
    folder: Path, tasks: list[str], own: dict[str, str], options: argparse.Namespace
) -> Any:
    """Returns results and samples of lm-eval's Hugging Face model.

    Its tokenizer adds the prefix before a context; lm-eval itself adds it before a rolling window.
    """
    results, samples = {"results": {}}, {}
    for rolling in (False, True):
        part = [task for task in tasks if (task == ROLLING) == rolling]
        if not part:
            continue
        prefix = {"add_bos_token": False} if rolling else {}
        model = hugging_face_model(folder, options.device, options.batch_size, **prefix)
        found, scored = evaluate_model(model, part, own, local=True, limit=options.limit)
        results["results"] |= found["results"]
        samples |= scored
    return results, samples


def worst(ours: list[Any], theirs: list[Any]) -> float:
    """Returns the largest difference of a log-likelihood of a task."""

    def values(sample: Any) -> list[float]:
        answers = [answer[0] for answer in sample["resps"]]
        return [float(a[0] if isinstance(a, tuple | list) else a) for a in answers]

    pairs = zip(ours, theirs, strict=True)
    return max(
        abs(mine - other)
        for one, two in pairs
        for mine, other in zip(values(one), values(two), strict=True)
    )


def compare(report: Report, tasks: list[str], ours: Any, theirs: Any, name: str) -> None:
    """Prints every metric and the largest difference of a sample."""
    for task in tasks:
        for key, value in ours[0]["results"][task].items():
            metric = key.split(",")[0]
            if not isinstance(value, float) or metric.endswith("_stderr"):
                continue
            share = metric.startswith("acc")
            within = METRIC_TOLERANCE if share else RELATIVE_TOLERANCE * abs(value)
            other = theirs[0]["results"][task][key]
            report.equal(f"{task} {metric}", value, other, name, "", within)
        bound = DOCUMENT_TOLERANCE if task == ROLLING else SAMPLE_TOLERANCE
        found = worst(ours[1][task], theirs[1][task])
        report.figure(
            f"{task}: largest of {len(ours[1][task])} against {name}", found, "nats", bound
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--task-data", type=Path, required=True)
    parser.add_argument("--tasks", default=",".join(RECORDS))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    tasks = options.tasks.split(",")
    own = definitions(tasks, options.task_data, BUILTIN)
    report = Report("seven_tasks", options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama"
        export(options.checkpoint, folder, add_bos=True)
        ours = native(options.checkpoint, tasks, own, options)
        say("native: done")
        again = native(folder, tasks, own, options)
        say("export, read by us: done")
        compare(report, tasks, ours, lm_evals(folder, tasks, own, options), "HFLM on the export")
        for task in tasks:
            found = worst(ours[1][task], again[1][task])
            bound = DOCUMENT_TOLERANCE if task == ROLLING else SAMPLE_TOLERANCE
            report.figure(f"{task}: largest against the export read by us", found, "nats", bound)


if __name__ == "__main__":
    main()
