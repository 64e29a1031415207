"""Expands an experiment into its runs, each a valid run configuration."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from leviathan.checkpoint.layout import step_dir
from leviathan.config.experiment import ExperimentConfig, GroupConfig, TinyCorpusConfig
from leviathan.config.load import Origins, lay, read_config, validate
from leviathan.config.run import RunConfig
from leviathan.errors import ConfigError
from leviathan.estimate.params import count_params

PAD_TO = 64  # multiple of a small padded vocabulary, for efficient matrix sizes


@dataclass(frozen=True)
class ExperimentRun:
    """One run of an experiment.

    Attributes:
        group, arm, seed: position in the experiment; the group is "" without groups.
        sweep: swept key → value.
        baseline: whether its arm is the baseline.
        name: unique name in the experiment, and directory within `out`.
        config: run configuration.
    """

    group: str
    arm: str
    seed: int
    sweep: dict[str, Any]
    baseline: bool
    name: str
    config: RunConfig

    @property
    def record(self) -> dict[str, Any]:
        """Position of the run, as plain JSON values."""
        return {
            "name": self.name,
            "group": self.group,
            "arm": self.arm,
            "seed": self.seed,
            "sweep": self.sweep,
            "baseline": self.baseline,
            "run_dir": str(self.config.run_dir),
        }

    @property
    def is_complete(self) -> bool:
        """Whether the last checkpoint exists, so that no training remains."""
        directory = step_dir(self.config.run_dir, self.config.train.steps)
        return (directory / "manifest.json").is_file()


@dataclass(frozen=True)
class Experiment:
    """An experiment: its configuration, and its runs in order of execution."""

    path: Path
    config: ExperimentConfig
    runs: list[ExperimentRun]


def load_experiment(path: Path, overrides: list[str] | None = None) -> Experiment:
    """Reads an experiment and expands its runs.

    Args:
        path: the YAML file; its `run:` is relative to its directory.
        overrides: `a.b=c` changes to the experiment.

    Raises:
        ConfigError: lists all problems of the experiment, or else of all its runs.
    """
    data, origins = read_config(path, overrides or [])
    config = validate(data, ExperimentConfig, str(path), origins)
    runs: list[ExperimentRun] = []
    faults: dict[str, None] = {}  # each once, in order: many runs have the same problem
    for group_name, group in config.all_groups().items():
        steps = None
        for arm, seed, swept in _combinations(config, group):
            place = _RunContext(path, config, origins, group_name, group, arm)
            try:
                if steps is None:
                    steps = place.steps(swept)
                runs.append(place.run(seed, swept, steps))
            except ConfigError as error:
                faults |= dict.fromkeys(str(error).splitlines())
    if faults:
        raise ConfigError("experiment.invalid", "\n".join(faults))
    return Experiment(path, config, runs)


def data_folder(text: TinyCorpusConfig, vocab_size: int | None) -> Path:
    """Directory of the tiny dataset with this vocabulary size."""
    return text.folder / f"v{vocab_size or text.vocab_size}-t{text.seq_len}"


def _combinations(
    config: ExperimentConfig, group: GroupConfig
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(arm, seed, sweep) of a group; all arms of a seed are consecutive."""
    for values in product(*config.sweep.values()):
        swept = dict(zip(config.sweep, values, strict=True))
        for seed in config.seeds:
            for arm in group.arms or config.arms:
                yield arm, seed, swept


@dataclass(frozen=True)
class _RunContext:
    """An arm of a group, the base of its runs."""

    path: Path
    config: ExperimentConfig
    origins: Origins
    group_name: str
    group: GroupConfig
    arm: str

    @property
    def baseline(self) -> str:
        return self.group.baseline or self.config.baseline

    def run(self, seed: int, swept: dict[str, Any], steps: int | None) -> ExperimentRun:
        parts = [self.arm]
        parts += [f"{key.rpartition('.')[2]}{value}" for key, value in swept.items()]
        name = "-".join([*parts, f"s{seed}"])
        name = f"{self.group_name}/{name}" if self.group_name else name
        fixed = {"seed": seed, "run_dir": str(self.config.out / name)}
        fixed |= {"train.steps": steps} if steps else {}
        config = self._resolve(self.arm, swept, fixed)
        is_base = self.arm == self.baseline
        return ExperimentRun(self.group_name, self.arm, seed, swept, is_base, name, config)

    def steps(self, swept: dict[str, Any]) -> int | None:
        """Number of steps for a budget in tokens per parameter; None without a budget."""
        ratio = self.group.tokens_per_parameter or self.config.tokens_per_parameter
        if ratio is None:
            return None
        base = self._resolve(self.baseline, swept, {"run_dir": "unused"})
        tokens = ratio * count_params(base.model).total
        return max(1, round(tokens / (base.train.global_batch_size * base.model.seq_len)))

    def _resolve(self, arm: str, swept: dict[str, Any], fixed: dict[str, Any]) -> RunConfig:
        """The run configuration with all changes applied, the most specific last."""
        file = self.path.parent / str(self.group.run or self.config.run)
        data, origins = read_config(file)
        data = copy.deepcopy(data)
        in_group = ("groups", self.group_name)
        arms = (*in_group, "arms") if self.group.arms else ("arms",)
        layers = [
            (self._text(), ("tiny_corpus",)),
            (self.config.set, ("set",)),
            (self.group.set, (*in_group, "set")),
            ((self.group.arms or self.config.arms)[arm], (*arms, arm)),
            (swept, ("sweep",)),
            (fixed, ()),
        ]
        for changes, section in layers:
            # A different kind replaces its section, so it precedes the other keys of the section.
            for key in sorted(changes, key=lambda key: not key.endswith("kind")):
                lay(data, origins, tuple(key.split(".")), changes[key], self._said(section, key))
        return validate(data, RunConfig, str(file), origins)

    def _said(self, section: tuple[str, ...], key: str) -> str:
        """File and line of the key, or of the nearest enclosing section."""
        path = (*section, key)
        nested = (*section, *key.split("."))
        for spot in (path, *(nested[:n] for n in range(len(nested), 0, -1))):
            if spot in self.origins:
                return self.origins[spot]
        return str(self.path)

    def _text(self) -> dict[str, Any]:
        text = self.config.tiny_corpus
        if text is None:
            return {}
        ids = (self.group.vocab_size or text.vocab_size) + 1  # and end-of-text
        return {
            "data.path": str(data_folder(text, self.group.vocab_size)),
            "model.vocab_size": ids,
            "model.padded_vocab_size": -(-ids // PAD_TO) * PAD_TO,
            "model.seq_len": text.seq_len,
        }
