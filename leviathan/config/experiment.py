"""The configuration of an experiment: runs that answer one question, and the planned hardware.

An experiment changes a run configuration by arm (what is compared), by group (separate
comparisons, such as one per scale), by sweep and by seed. Runs are compared within their group.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from leviathan.config.base import (
    ByteCount,
    Dimension,
    Paths,
    PositiveFloat,
    PositiveInt,
    Strict,
    UserPath,
    VocabularySize,
)
from leviathan.config.identity import flatten


def _nothing_is_no_change(value: Any) -> Any:
    if value is None:
        return {}
    return flatten(value) if isinstance(value, dict) else value


# Changes to a run configuration, `model.embedding.kind: tied`, dotted or nested.
Changes = Annotated[dict[str, Any], BeforeValidator(_nothing_is_no_change)]
Arms = dict[str, Changes]


def _single(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: own if isinstance(own, list) else [own] for key, own in flatten(value).items()}


Sweep = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], BeforeValidator(_single)]


class GroupConfig(Strict):
    """A comparison within an experiment. Keys that are not set are taken from the experiment."""

    run: str | None = Field(
        default=None,
        description="run configuration of the group, relative to this file; null: the experiment's",
    )
    set: Changes = Field(default_factory=dict, description="changes to every run of the group")
    arms: Arms | None = Field(
        default=None, min_length=1, description="arms of the group; null: the experiment's"
    )
    baseline: str | None = Field(
        default=None, description="baseline of the group; null: the experiment's"
    )
    vocab_size: VocabularySize | None = Field(
        default=None,
        description="vocabulary size of the tiny corpus in this group; null: the experiment's",
    )
    tokens_per_parameter: PositiveFloat | None = Field(
        default=None,
        description="training tokens per parameter of the baseline; sets train.steps of all arms",
    )


class TinyCorpusConfig(Strict):
    """A small corpus made from the Python standard library, for experiments without other data.

    It sets `data.path`, `model.vocab_size`, `model.padded_vocab_size` and `model.seq_len`.
    """

    folder: UserPath = Field(
        description="directory of corpus, tokenizers and datasets; several experiments may share it"
    )
    vocab_size: VocabularySize = Field(default=8192, description="number of byte-level BPE entries")
    seq_len: Dimension = Field(default=128, description="sample length in tokens")
    max_bytes: ByteCount = Field(
        default=10_000_000, description="maximum size of the text in bytes"
    )


class MachineConfig(Strict):
    """The device that the plan's hours are estimated for."""

    name: str = Field(default="H100", description="name of the device, for the plan's heading")
    peak_tflops: PositiveFloat = Field(
        default=989.0, description="dense bf16 peak per device in TFLOP/s"
    )
    mfu: float = Field(
        default=0.4, gt=0, le=1, strict=False, description="assumed model FLOPs utilization"
    )
    devices: PositiveInt = Field(default=8, description="number of devices per run")
    memory_gb: PositiveFloat = Field(default=80.0, description="memory per device in GB")


class EvaluateConfig(Strict):
    """Evaluations of each complete run, in addition to the validation loss."""

    frequency: bool = Field(default=True, description="evaluate the loss by training frequency")
    tasks: Paths = Field(default_factory=list, description="lm-eval tasks to run")
    task_data: UserPath | None = Field(default=None, description="directory with the task data")
    limit: PositiveInt | None = Field(
        default=None, description="maximum samples per task; null: all"
    )


class ExperimentConfig(Strict):
    """An experiment: `leviathan experiment plan EXPERIMENT.yaml`."""

    title: str = Field(min_length=1, description="title of the report")
    question: str = Field(min_length=1, description="question that the experiment answers")
    caution: str = Field(default="", description="limits of the conclusions, printed in the report")
    out: UserPath = Field(description="output directory of all runs")
    run: str | None = Field(default=None, description="run configuration, relative to this file")
    set: Changes = Field(default_factory=dict, description="changes to every run")
    baseline: str = Field(description="name of the arm that the others are compared with")
    arms: Arms = Field(
        default_factory=dict, description="arms in order: name → changes to the run configuration"
    )
    groups: dict[str, GroupConfig] = Field(default_factory=dict)
    seeds: list[Annotated[int, Field(ge=0)]] = Field(
        default=[1234], min_length=1, description="seeds; each arm is trained with each of them"
    )
    sweep: Sweep = Field(
        default_factory=dict, description="swept keys → values; all combinations are trained"
    )
    tokens_per_parameter: PositiveFloat | None = Field(
        default=None,
        description="training tokens per parameter of the baseline, instead of train.steps",
    )
    tiny_corpus: TinyCorpusConfig | None = None
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    launch: str = Field(
        default="", description="launcher command, such as deepspeed --num_accelerators 8"
    )
    machine: MachineConfig = Field(default_factory=MachineConfig)

    @model_validator(mode="after")
    def _each_group_is_whole(self) -> "ExperimentConfig":
        faults = []
        for name, group in self.all_groups().items():
            where = f"groups.{name}" if name else "the experiment"
            arms = group.arms or self.arms
            if not arms:
                faults.append(f"{where} has no arms")
            elif (baseline := group.baseline or self.baseline) not in arms:
                faults.append(
                    f"{where}: baseline {baseline!r} is not one of the arms {', '.join(arms)}"
                )
            if not (group.run or self.run):
                faults.append(f"{where} has no `run` (path of a run configuration)")
        for what in ("seed", "run_dir"):
            if any(what in changes for changes in self._all_changes()):
                faults.append(f"{what} cannot be set: it is derived from the experiment")
        if len(set(self.seeds)) < len(self.seeds):
            faults.append(f"duplicate seeds: {self.seeds}")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def all_groups(self) -> dict[str, GroupConfig]:
        """The groups; a single one without a name if none are configured."""
        return self.groups or {"": GroupConfig()}

    def _all_changes(self) -> list[dict[str, Any]]:
        groups = list(self.groups.values())
        arms = [self.arms, *(group.arms or {} for group in groups)]
        changes = [own for group in arms for own in group.values()]
        return [self.set, self.sweep, *(group.set for group in groups), *changes]
