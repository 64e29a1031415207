"""Loads the runs of a report: run directories or an experiment, sorted into groups and arms."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leviathan.analysis.runs import METRICS, Run, load_run, read_result
from leviathan.config.identity import arm_of
from leviathan.config.load import read_config
from leviathan.console import say
from leviathan.errors import DataError

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
