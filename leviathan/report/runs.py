"""Runs as stored in their directories: configuration, curves, evaluations; groups and arms."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.checkpoint.layout import complete_checkpoints, step_of
from leviathan.config.identity import arm_of
from leviathan.config.load import read_config, read_yaml
from leviathan.console import say
from leviathan.errors import DataError
from leviathan.evaluate.frequency_buckets import FrequencyBuckets
from leviathan.files import read_json
from leviathan.report.curves import smoothed, smoothing_width
from leviathan.train.metrics_log import METRICS, parse_line

# ---------------------------------------------------------------- one run

# keys of config.yaml that the report reads, with their types
_NEEDED: dict[str, type] = {
    "model.embedding.kind": str,
    "model.seq_len": int,
    "train.steps": int,
    "train.global_batch_size": int,
    "data.path": str,
}
# minimum shares of the CPU time, in use and used by other processes, that slow down a run
CPU_BUSY, CPU_OTHERS = 0.9, 0.1
FINAL_SHARE = 0.1  # the "final" training loss is the mean over this last share of the steps


@dataclass(frozen=True)
class Run:
    """Contents of a run directory, read once.

    Attributes:
        path: the run directory.
        config: the resolved configuration as plain dicts.
        metrics: logged steps, each key an array over them ("step", "loss", "tokens_per_s", …).
        validation: (step, loss in nats per token) in the order of steps, `[N, 2]`.
        facts: run.json and state.json of the latest checkpoint, merged; `{}` if neither exists.
        evaluated_step: step of the latest evaluation; None without one.
        perplexity, lm_eval: results of that evaluation; None if it was not run.
        buckets: its losses per document; None if `leviathan frequency` was not run.
        tokenizer, data: fingerprints of the tokenizer and the dataset; None if no file records
            them.
        compares_loop: whether the validation loss is that of the training loop although
            `perplexity` exists, because another run of the comparison has no other loss.
    """

    path: Path
    config: dict[str, Any]
    metrics: dict[str, np.ndarray]
    validation: np.ndarray
    facts: dict[str, Any]
    evaluated_step: int | None
    perplexity: dict[str, Any] | None
    lm_eval: dict[str, Any] | None
    buckets: FrequencyBuckets | None
    tokenizer: str | None
    data: str | None
    compares_loop: bool = False

    @property
    def kind(self) -> str:
        """Kind of the input embedding."""
        return self.config["model"]["embedding"]["kind"]

    @property
    def tokens_per_step(self) -> int:
        """Targets of one optimizer step, assuming full samples."""
        return self.config["train"]["global_batch_size"] * self.config["model"]["seq_len"]

    @property
    def step(self) -> int:
        """Last logged step."""
        return int(self.metrics["step"][-1])

    @property
    def planned_steps(self) -> int:
        """Configured number of steps."""
        return self.config["train"]["steps"]

    @property
    def train_loss(self) -> float | None:
        """Mean logged training loss over the last tenth of the steps, nats per token."""
        step, loss = self.metrics["step"], self.metrics["loss"]
        last = loss[(step > (1 - FINAL_SHARE) * step[-1]) & np.isfinite(loss)]
        return float(last.mean()) if len(last) else None

    @property
    def validation_loss(self) -> float | None:
        """Nats per token on the full validation split, else of the last in-loop validation."""
        if self.perplexity is not None and not self.compares_loop:
            return self.perplexity["nats_per_token"]
        return float(self.validation[-1, 1]) if len(self.validation) else None

    @property
    def loop_step(self) -> int | None:
        """Step of the last validation by the training loop."""
        return int(self.validation[-1, 0]) if len(self.validation) else None

    @property
    def loss_step(self) -> int | None:
        """Step at which `validation_loss` was measured."""
        if self.perplexity is not None and not self.compares_loop:
            return self.evaluated_step
        return self.loop_step

    @property
    def lr(self) -> float | None:
        """Peak learning rate."""
        return (self.config.get("optim") or {}).get("lr")

    @property
    def tokens_per_s(self) -> float | None:
        """Median speed over the logged steps except the first, which includes warm-up."""
        speed = self.metrics.get("tokens_per_s")
        if speed is None:
            return None
        speed = speed[np.isfinite(speed)]
        speed = speed[1:] if len(speed) > 1 else speed
        return float(np.median(speed)) if len(speed) else None

    @property
    def train_seconds(self) -> float | None:
        """Time spent in training steps, from the speed of every logged interval.

        Excludes evaluation, checkpoints and profiling. An interval in which all steps were profiled
        has no speed and uses that of the run.
        """
        speed, profiled = self.metrics.get("tokens_per_s"), self.metrics.get("profiled_steps")
        if speed is not None and profiled is not None:
            speed = np.where(~np.isfinite(speed) & (profiled > 0), self.tokens_per_s or 0, speed)
        if speed is None or not np.all(speed > 0):
            return None
        intervals = np.diff(self.metrics["step"], prepend=0) * self.tokens_per_step
        return float((intervals / speed).sum())

    @property
    def overloaded(self) -> float | None:
        """Share of the logged intervals in which other processes used much of the CPU time.

        See `leviathan.train.step_timer`. None if the run did not record it.
        """
        busy, others = self.metrics.get("cpu_busy"), self.metrics.get("cpu_others")
        if busy is None or others is None:
            return None
        known = np.isfinite(busy) & np.isfinite(others)
        crowded = (busy >= CPU_BUSY) & (others >= CPU_OTHERS)
        return float(crowded[known].mean()) if known.any() else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte on the full validation split, if evaluated."""
        return (self.perplexity or {}).get("bits_per_byte")

    @property
    def seed(self) -> int | None:
        """Seed of the initial weights and the data order."""
        return self.config.get("seed")

    @property
    def machine(self) -> str | None:
        """Hardware and date of the run, if recorded."""
        parts = [self.facts.get("machine"), self.facts.get("date")]
        return ", ".join(str(part) for part in parts if part) or None

    @property
    def flops_per_token(self) -> int | None:
        """FLOPs of forward and backward passes, as counted by the training loop."""
        return (self.parameters or {}).get("flops_per_token")

    @property
    def validation_curve(self) -> np.ndarray:
        """Curve (tokens, nats per token) from which efficiency is computed, `[N, 2]`.

        The validation curve if it has at least three points, else the smoothed training loss.
        """
        if len(self.validation) >= 3:
            return self.validation * [self.tokens_per_step, 1]
        loss = self.metrics["loss"]
        finite = np.isfinite(loss)
        tokens = self.metrics["step"][finite] * self.tokens_per_step
        width = smoothing_width(int(finite.sum()))
        return np.stack([tokens, smoothed(loss[finite], width)], axis=1)

    @property
    def parameters(self) -> dict[str, int] | None:
        """Parameters by part, as recorded by the training loop or an evaluation."""
        for source in (self.facts, self.perplexity or {}):
            found = source.get("parameters")
            if isinstance(found, dict) and "total" in found:
                return found
        return None


def load_run(path: Path) -> Run:
    """Reads a run directory.

    Raises:
        DataError: the directory is not a run, or one of its files is corrupt.
    """
    config = _read_config(path)
    metrics, validation = _read_metrics(path / METRICS)
    facts = _newest_state(path) | (read_result(path / "run.json") or {})
    evaluation = _newest_evaluation(path)
    step = step_of(evaluation) if evaluation else None
    results = evaluation or path / "evaluation"
    buckets_file = results / "frequency.npz"
    perplexity = read_result(results / "perplexity.json")
    if perplexity is not None and not _is_number(perplexity.get("nats_per_token")):
        raise DataError(
            "run.result_corrupt",
            f"{results / 'perplexity.json'}: corrupt (nats_per_token is not a number). Delete "
            "it and evaluate again.",
        )
    tokenizer, data = _fingerprints(path, config, facts)
    return Run(
        path=path,
        config=config,
        metrics=metrics,
        validation=validation,
        facts=facts,
        evaluated_step=step,
        perplexity=perplexity,
        lm_eval=read_result(results / "lm_eval.json"),
        buckets=FrequencyBuckets.load(buckets_file) if buckets_file.exists() else None,
        tokenizer=tokenizer,
        data=data,
    )


def read_result(path: Path) -> dict[str, Any] | None:
    """Reads the results of an evaluation; None if the file does not exist.

    Raises:
        DataError: the file is not a JSON object.
    """
    if not path.exists():
        return None
    return read_json(path, "run.result_corrupt", "Delete it and evaluate again.")


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.yaml"
    if not file.exists():
        raise DataError(
            "run.not_found",
            f"{path}: not a run directory: config.yaml is missing. Give the run_dir of a "
            "training run",
        )
    config = read_yaml(_read_text(file), str(file))
    for dotted, kind in _NEEDED.items():
        value: Any = config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            raise DataError(
                "run.config_invalid",
                f"{file}: not the resolved configuration of a run: {dotted} is missing or has "
                "another type",
            )
    return config


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError("run.unreadable", f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(
            "metrics.corrupt",
            f"{file}: corrupt: byte 0x{error.object[error.start]:02x} at {error.start:,} is not "
            "valid UTF-8",
        ) from None


def _read_metrics(file: Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The last record of every step: a resumed run may have logged some steps twice."""
    if not file.exists():
        raise DataError(
            "metrics.not_found", f"{file}: not found: the run has not logged a step yet"
        )
    logged: dict[int, dict[str, Any]] = {}
    validation: dict[int, float] = {}
    for number, line in enumerate(_read_text(file).splitlines(), start=1):
        record = parse_line(line)
        if record is None:  # a killed run leaves at most one truncated line, at its end
            if line.strip() and number == 1:
                raise DataError(
                    "metrics.corrupt", f"{file}: line 1 is not a metrics record: {line[:80]!r}"
                )
            continue
        step = int(record["step"])
        if _is_number(record.get("val_loss")):
            validation[step] = float(record["val_loss"])
        if "loss" in record:
            logged[step] = record
    if not logged:
        raise DataError(
            "metrics.empty",
            f"{file}: contains no training step. Wait until the run has logged its first step",
        )
    steps = sorted(logged)
    metrics = {"step": np.array(steps)}
    for key in sorted({key for record in logged.values() for key in record} - {"step", "val_loss"}):
        metrics[key] = _floats(logged[step].get(key) for step in steps)
    return metrics, np.array(sorted(validation.items()), dtype=float).reshape(-1, 2)


def _floats(values: Iterable[Any]) -> np.ndarray:
    return np.array([value if _is_number(value) else np.nan for value in values], float)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _newest(folders: Iterable[Path]) -> Path | None:
    return max(folders, key=lambda folder: folder.name, default=None)


def _newest_state(path: Path) -> dict[str, Any]:
    """state.json of the latest complete checkpoint."""
    newest = next(reversed(complete_checkpoints(path)), None)
    return (read_result(newest / "state.json") or {}) if newest else {}


def _newest_evaluation(path: Path) -> Path | None:
    return _newest(folder for folder in path.glob("evaluation/step-*") if folder.is_dir())


def _fingerprints(
    path: Path, config: dict[str, Any], facts: dict[str, Any]
) -> tuple[str | None, str | None]:
    """Fingerprints (tokenizer, dataset), from the first file that records them."""
    newest = next(reversed(complete_checkpoints(path)), None)
    tokenizer = (read_result(newest / "tokenizer.meta.json") or {}) if newest else {}
    # The dataset may have been prepared again at the same place since the run: its own
    # description is used last.
    info = read_result(Path(config["data"]["path"]) / "dataset.json") or {}
    of_data = info.get("tokenizer")
    of_data = of_data.get("fingerprint") if isinstance(of_data, dict) else None
    return (
        tokenizer.get("fingerprint") or of_data,
        facts.get("data_fingerprint") or info.get("fingerprint"),
    )


# ---------------------------------------------------------------- all runs

EXPERIMENT_FILE = "experiment.json"


@dataclass(frozen=True)
class RunRecord:
    """A run with its group, its arm and the values of its sweep."""

    run: Run
    group: str
    arm: str
    baseline: bool
    sweep: dict[str, Any] = field(default_factory=dict)

    @property
    def swept(self) -> str:
        """The values of the sweep as text, `lr 0.001`; empty without a sweep."""
        return ", ".join(f"{k.rpartition('.')[2]} {_plain(v)}" for k, v in self.sweep.items())


@dataclass(frozen=True)
class LoadedRuns:
    """All runs of a report, and the metadata of the experiment."""

    entries: list[RunRecord]
    title: str = ""
    question: str = ""
    caution: str = ""
    missing: tuple[str, ...] = ()

    @property
    def is_experiment(self) -> bool:
        """Whether the runs belong to an experiment, which defines their groups and arms."""
        return bool(self.title)


def load_runs(paths: Sequence[Path]) -> LoadedRuns:
    """Reads run directories, or one experiment (its YAML file, or the directory of its runs).

    Raises:
        DataError: no run was given, a directory is not a run, or no run of the experiment has
            started.
        ConfigError: the experiment file cannot be read.
    """
    if not paths:
        raise DataError(
            "report.no_runs",
            "no run directory given; usage: leviathan report RUN [RUN …] --out DIR",
        )
    folders = [_experiment_folder(Path(path)) for path in paths]
    experiments = [folder for folder in folders if folder is not None]
    if not experiments:
        return LoadedRuns(_by_configuration([load_run(Path(path)) for path in paths]))
    if len(paths) > 1:
        raise DataError(
            "report.mixed_with_experiment",
            f"{experiments[0]} is an experiment: pass only this path, or the directories of its "
            "runs",
        )
    return _from_experiment(experiments[0])


def _experiment_folder(path: Path) -> Path | None:
    """The directory of the runs of an experiment; None if `path` is not an experiment."""
    if path.suffix in (".yaml", ".yml"):
        data, _ = read_config(path)
        if "out" not in data or ("arms" not in data and "groups" not in data):
            raise DataError(
                "experiment.not_found",
                f"{path}: not an experiment; give the YAML file of an experiment, or run "
                "directories",
            )
        folder = Path(str(data["out"]))
        if not (folder / EXPERIMENT_FILE).exists():
            raise DataError(
                "experiment.no_runs",
                f"{path}: {folder} contains no runs; run `leviathan experiment run {path}`",
            )
        return folder
    return path if (path / EXPERIMENT_FILE).exists() else None


def _from_experiment(folder: Path) -> LoadedRuns:
    experiment = read_result(folder / EXPERIMENT_FILE) or {}
    entries, missing = [], []
    try:
        for record in experiment["runs"]:
            place = _run_folder(folder, record)
            if not (place / METRICS).exists():
                missing.append(record["name"])
                continue
            entries.append(
                RunRecord(
                    load_run(place),
                    record["group"],
                    record["arm"],
                    record["baseline"],
                    record["sweep"],
                )
            )
        texts = (experiment["title"], experiment["question"], experiment["caution"])
    except (KeyError, TypeError) as error:
        raise DataError(
            "experiment.corrupt",
            f"{folder / EXPERIMENT_FILE}: corrupt ({error!r}); run the experiment again",
        ) from None
    if not entries:
        raise DataError(
            "experiment.no_runs",
            f"{folder}: none of the {len(missing)} runs of the experiment has started",
        )
    if missing:
        say(f"{len(missing)} runs of the experiment have not started: {', '.join(missing[:6])}")
    return LoadedRuns(entries, *texts, tuple(missing))


def _run_folder(folder: Path, record: dict[str, Any]) -> Path:
    """Path of a run: in the current directory of the experiment, else as recorded."""
    moved = folder / record["name"]
    return moved if moved.exists() else Path(record["run_dir"])


def _by_configuration(runs: Sequence[Run]) -> list[RunRecord]:
    """Groups runs into arms: the same configuration except for keys that do not define an arm.

    `leviathan.config.identity` lists these keys. The arm of the first run is the baseline.
    """
    arms: list[str] = []
    for run in runs:
        own = [run.data, arm_of(run.config)]
        arm, number = json.dumps(own, sort_keys=True, default=str), 0
        # Two runs with the same seed are not replicates: they are compared with each other.
        taken = [other.seed for other, name in zip(runs, arms, strict=False) if name == arm]
        if run.seed in taken:
            number = len(taken)
        arms.append(arm if not number else f"{arm} {number}")
    keys = list(dict.fromkeys(arms))
    firsts = [runs[arms.index(key)] for key in keys]
    names = dict(zip(keys, _labels(firsts), strict=True))
    return [
        RunRecord(run, "", names[arm], arm == arms[0]) for run, arm in zip(runs, arms, strict=True)
    ]


def _labels(runs: Sequence[Run]) -> list[str]:
    """Embedding kinds if they distinguish the runs, else directory names, else numbered names."""
    for names in ([run.kind for run in runs], [run.path.name for run in runs]):
        if len(set(names)) == len(names):
            return names
    return [f"{run.path.name} #{number}" for number, run in enumerate(runs, start=1)]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
