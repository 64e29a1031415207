"""Which runs a report is about: run folders, or a whole experiment, sorted into groups and arms."""

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
    """A run in its place: group, arm, and the values that a sweep gave it."""

    run: Run
    group: str
    arm: str
    baseline: bool
    sweep: dict[str, Any] = field(default_factory=dict)

    @property
    def swept(self) -> str:
        """The sweep's values as text, `lr 0.001`; empty without a sweep."""
        return ", ".join(f"{k.rpartition('.')[2]} {_plain(v)}" for k, v in self.sweep.items())


@dataclass(frozen=True)
class LoadedRuns:
    """All runs of a report, and what the experiment says of itself."""

    entries: list[RunRecord]
    title: str = ""
    question: str = ""
    caution: str = ""
    missing: tuple[str, ...] = ()

    @property
    def is_experiment(self) -> bool:
        """Whether the runs came from an experiment, which says how they belong together."""
        return bool(self.title)


def load_runs(paths: Sequence[Path]) -> LoadedRuns:
    """Reads run folders, or one experiment (its YAML file, or the folder of its runs).

    Raises:
        DataError: no run, a folder that is none, or an experiment none of whose runs has begun.
        ConfigError: the experiment's file cannot be read.
    """
    if not paths:
        raise DataError(
            "report.no_runs", "no run folder given; usage: leviathan report RUN [RUN …] --out DIR"
        )
    folders = [_experiment_folder(Path(path)) for path in paths]
    experiments = [folder for folder in folders if folder is not None]
    if not experiments:
        return LoadedRuns(_by_configuration([load_run(Path(path)) for path in paths]))
    if len(paths) > 1:
        raise DataError(
            "report.mixed_with_experiment",
            f"{experiments[0]} is an experiment: report it alone, or name its runs",
        )
    return _from_experiment(experiments[0])


def _experiment_folder(path: Path) -> Path | None:
    """The folder of an experiment's runs, if `path` means an experiment."""
    if path.suffix in (".yaml", ".yml"):
        data, _ = read_config(path)
        if "out" not in data or ("arms" not in data and "groups" not in data):
            raise DataError(
                "experiment.not_found",
                f"{path}: no experiment; give an experiment's YAML file or run folders",
            )
        folder = Path(str(data["out"]))
        if not (folder / EXPERIMENT_FILE).exists():
            raise DataError(
                "experiment.no_runs",
                f"{path}: nothing in {folder} yet: run `leviathan experiment run {path}`",
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
            f"{folder / EXPERIMENT_FILE}: damaged ({error!r}); run the experiment again",
        ) from None
    if not entries:
        raise DataError(
            "experiment.no_runs",
            f"{folder}: none of the experiment's {len(missing)} runs has begun yet",
        )
    if missing:
        say(f"{len(missing)} runs of the experiment are not there yet: {', '.join(missing[:6])}")
    return LoadedRuns(entries, *texts, tuple(missing))


def _run_folder(folder: Path, record: dict[str, Any]) -> Path:
    """Where a run lies: below the experiment's folder as it is now, else where it was written."""
    moved = folder / record["name"]
    return moved if moved.exists() else Path(record["run_dir"])


def _by_configuration(runs: Sequence[Run]) -> list[RunRecord]:
    """Groups runs into arms: the same configuration except for keys that do not define an arm.

    `leviathan.config.identity` lists these keys. The first run's arm is the baseline.
    """
    arms: list[str] = []
    for run in runs:
        own = [run.data, arm_of(run.config)]
        arm, number = json.dumps(own, sort_keys=True, default=str), 0
        # The same seed twice is no replicate: these are to be held against each other.
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
    """Kinds where they tell the runs apart, else folder names, else numbers too."""
    for names in ([run.kind for run in runs], [run.path.name for run in runs]):
        if len(set(names)) == len(names):
            return names
    return [f"{run.path.name} #{number}" for number, run in enumerate(runs, start=1)]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
