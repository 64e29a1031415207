"""Runs an experiment on this host: dataset, training runs in order, evaluations, report.

Every stage skips what is complete, so the same command resumes after any interruption.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leviathan.checkpoint.layout import evaluation_dir
from leviathan.config.data import PrepConfig
from leviathan.config.experiment import TinyCorpusConfig
from leviathan.config.load import dump_config
from leviathan.console import Bar, progress_bar, say
from leviathan.data.format import DATASET_FILE, DatasetInfo
from leviathan.errors import DataError, LeviathanError
from leviathan.experiments.emit import command_of
from leviathan.experiments.expand import Experiment, ExperimentRun, data_folder
from leviathan.experiments.plan import plan_experiment
from leviathan.files import check_writable_dir, write_atomic
from leviathan.train.metrics_log import last_step, logged

EXPERIMENT_FILE = "experiment.json"
POLL_S = 0.3


def run_experiment(experiment: Experiment) -> dict[str, Any]:
    """Prepares the tiny corpus, if configured, then trains and evaluates all runs.

    A failed run does not stop the others.

    Returns:
        The plan after the runs, as from `plan_experiment`, with the names of failed runs under
        "failed".

    Raises:
        ConfigError, DataError: a requirement of the experiment is missing.
        LeviathanError: at the end, if runs failed; it names them.
    """
    out = experiment.config.out
    check_writable_dir(out)
    out.mkdir(parents=True, exist_ok=True)
    if experiment.config.tiny_corpus is not None:
        prepare_text(
            experiment.config.tiny_corpus,
            [g.vocab_size for g in experiment.config.all_groups().values()],
        )
    check_data(experiment)
    describe_experiment(experiment)
    failed: dict[str, Path] = {}
    for number, run in enumerate(experiment.runs, start=1):
        log = _train(experiment, run, f"{number}/{len(experiment.runs)} {run.name}")
        if log is not None:
            failed[run.name] = log
    done = [run for run in experiment.runs if run.is_complete]
    evaluate_runs(experiment, done)
    if failed:
        listed = "\n".join(f"  {name}: {_last_error(log)}" for name, log in failed.items())
        raise LeviathanError(
            "experiment.runs_failed",
            f"{len(failed)} of {len(experiment.runs)} runs failed; see the log in the directory "
            f"of each run:\n{listed}\nRun the same command to retry them.",
        )
    return plan_experiment(experiment)


def check_data(experiment: Experiment) -> None:
    """Checks before training that the requirements of the evaluations are met.

    Raises:
        DataError: a dataset has no validation samples.
    """
    if not experiment.config.evaluate.frequency:
        return
    for data in {str(run.config.data.path): run.config.data for run in experiment.runs}.values():
        if (data.path / DATASET_FILE).is_file() and "val" not in DatasetInfo.load(data.path).splits:
            raise DataError(
                "dataset.no_split",
                f"{data.path}: no 'val' split, which is required to compare runs: prepare the "
                "dataset with `validation:`, or set evaluate.frequency=false",
            )


def describe_experiment(experiment: Experiment) -> None:
    """Writes `experiment.json` with the metadata of the runs for the report."""
    config = experiment.config
    record = {
        "file": str(experiment.path),
        "title": config.title,
        "question": config.question,
        "caution": config.caution,
        "sweep": list(config.sweep),
        "runs": [run.record for run in experiment.runs],
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    write_atomic(config.out / EXPERIMENT_FILE, text.encode())


def prepare_text(text: TinyCorpusConfig, sizes: Sequence[int | None]) -> None:
    """Creates a corpus from the standard library, and a tokenizer and dataset per vocabulary size.

    Raises:
        DataError: this Python has no library sources, or the directory cannot be written.
    """
    from leviathan.data.prepare import prepare
    from leviathan.data.prepare.stdlib_corpus import write_stdlib_corpus
    from leviathan.data.tokenizer import meta_file_of, train_bpe

    corpus = text.folder / "corpus"
    write_stdlib_corpus(corpus, max_bytes=text.max_bytes)
    shards = sorted(corpus.glob("train-*"))
    for size in sorted({size or text.vocab_size for size in sizes}):
        ranks = text.folder / f"v{size}.tiktoken"
        if not (ranks.exists() and meta_file_of(ranks).exists()):
            train_bpe(shards, size, ranks)
        prepare(
            PrepConfig.model_validate(
                {
                    "source": {"paths": [str(path) for path in shards]},
                    "validation": {"paths": [str(corpus / "heldout.jsonl.zst")]},
                    "tokenizer": str(ranks),
                    "seq_len": text.seq_len,
                    "out": data_folder(text, size),
                    "deduplicate": True,
                }
            )
        )


def _train(experiment: Experiment, run: ExperimentRun, title: str) -> Path | None:
    """Trains one run in a separate process; returns the log if it fails."""
    steps, run_dir = run.config.train.steps, run.config.run_dir
    if run.is_complete:
        say(f"{title}: complete{_outcome(run_dir)}")
        return None
    configs = experiment.config.out / "configs"
    file = configs / f"{run.name.replace('/', '-')}.yaml"
    log = file.with_suffix(".log")
    configs.mkdir(parents=True, exist_ok=True)
    write_atomic(file, dump_config(run.config).encode())
    command = command_of(experiment.config.launch, file)
    with (
        _sigterm_ends_it(),
        log.open("wb") as stderr,
        progress_bar(title, total=steps, start=last_step(run_dir)) as bar,
    ):
        process = subprocess.Popen(
            _on_this_machine(command), stdout=stderr, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            while process.poll() is None:
                _show(bar, run_dir)
                time.sleep(POLL_S)
        except BaseException:
            process.terminate()  # it saves a checkpoint and exits
            process.wait()
            raise
        _show(bar, run_dir)
        if process.returncode == 0 and run.is_complete:
            bar.advance(0, _outcome(run_dir).removeprefix(", "))
            return None
        bar.advance(0, f"failed: {_last_error(log)}")
    return log


@contextmanager
def _sigterm_ends_it() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C: the current run also saves a checkpoint and exits."""

    def end(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _on_this_machine(command: Sequence[str]) -> list[str]:
    """Replaces `python` and launchers by those of this Python environment."""
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    program = Path(sys.executable).parent / command[0]
    return [str(program) if program.exists() else command[0], *command[1:]]


def _show(bar: Bar, run_dir: Path) -> None:
    losses = logged(run_dir, "loss")
    if losses:
        step = max(losses)
        rate = logged(run_dir, "tokens_per_s").get(step) or 0
        loss = f"{losses[step]:.3f}" if losses[step] is not None else "not finite"
        bar.advance(step - bar.done, f"loss {loss} · {rate:,.0f} tokens/s")


def _outcome(run_dir: Path) -> str:
    held = logged(run_dir, "val_loss")
    return f", validation loss {held[max(held)]:.4f}" if held and held[max(held)] else ""


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["exited without a message"])[-1][:300] + f" ({log})"


def evaluate_runs(experiment: Experiment, runs: Sequence[ExperimentRun]) -> None:
    """Computes missing losses by frequency and lm-eval tasks of complete runs."""
    evaluate = experiment.config.evaluate
    if evaluate.frequency:
        pending = [run for run in runs if not _filed(run, "frequency.npz")]
        for number, run in enumerate(pending, start=1):
            from leviathan.evaluate.frequency import frequency

            say(f"Loss by frequency {number}/{len(pending)}: {run.name}")
            frequency([run.config.run_dir], run.config.data.path, batch_size=64)
    pending = [run for run in runs if evaluate.tasks and not _filed(run, "lm_eval.json")]
    for number, run in enumerate(pending, start=1):
        from leviathan.evaluate.harness.model import run_tasks

        say(f"Tasks {number}/{len(pending)}: {run.name}")
        data = _task_data(experiment)
        run_tasks(run.config.run_dir, evaluate.tasks, data, evaluate.limit, 16, None)


def _task_data(experiment: Experiment) -> Path | None:
    text, given = experiment.config.tiny_corpus, experiment.config.evaluate.task_data
    return given or (text.folder / "corpus" if text else None)


def _filed(run: ExperimentRun, name: str) -> bool:
    return (evaluation_dir(run.config.run_dir, run.config.train.steps) / name).exists()
