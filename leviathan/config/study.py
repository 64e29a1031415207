"""A study as the user writes it: which runs answer one question, and on what machine.

A study is a run configuration, changed by arm (what is compared), by group (comparisons of their
own: a scale, a vocabulary), by sweep and by seed. Runs are compared inside their group only.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from leviathan.config.strict import Paths, PositiveFloat, PositiveInt, Strict, UserPath


def dotted(tree: Any, above: str = "") -> Any:
    """Nested mappings as one, `{a: {b: 1}}` → `{a.b: 1}`; anything else as it is."""
    if not isinstance(tree, dict):
        return tree
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= dotted(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def _nothing_is_no_change(value: Any) -> Any:
    return {} if value is None else dotted(value)


# Changes to a run configuration, `model.embedding.kind: tied`, dotted or nested.
Changes = Annotated[dict[str, Any], BeforeValidator(_nothing_is_no_change)]
Arms = dict[str, Changes]


def _single(value: Any) -> Any:
    swept = dotted(value)
    if not isinstance(swept, dict):
        return swept
    return {key: own if isinstance(own, list) else [own] for key, own in swept.items()}


Sweep = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], BeforeValidator(_single)]


class GroupConfig(Strict):
    """One comparison of a study; what is left out is the study's."""

    run: str | None = Field(default=None, description="run configuration, beside the study's file")
    set: Changes = Field(default_factory=dict, description="changes to every run of the group")
    arms: Arms | None = Field(default=None, min_length=1, description="in place of the study's")
    baseline: str | None = Field(default=None, description="in place of the study's")
    vocab_size: PositiveInt | None = Field(default=None, description="of the small text")
    tokens_per_parameter: PositiveFloat | None = Field(
        default=None, description="sets train.steps, by the baseline's parameters, for every arm"
    )


class TextConfig(Strict):
    """Small data made of the running Python's own library, so that anybody can run the study.

    It sets `data.path`, `model.vocab_size`, `model.padded_vocab_size` and `model.seq_len`.
    """

    folder: UserPath = Field(description="corpus, tokenizers and datasets; studies may share it")
    vocab_size: PositiveInt = Field(default=8192, description="byte-level BPE entries")
    seq_len: PositiveInt = Field(default=128, description="tokens")
    max_bytes: PositiveInt = Field(default=10_000_000, description="of text")


class MachineConfig(Strict):
    """What the plan's hours are reckoned for."""

    name: str = Field(default="H100", description="for the plan's heading")
    peak_tflops: PositiveFloat = Field(default=989.0, description="of one device, dense bf16")
    mfu: float = Field(default=0.4, gt=0, le=1, strict=False, description="of the peak, as planned")
    devices: PositiveInt = Field(default=8, description="at work on one run")
    memory_gb: PositiveFloat = Field(default=80.0, description="of one device")


class EvaluateConfig(Strict):
    """What is computed of every finished run, beside its validation loss."""

    frequency: bool = Field(default=True, description="loss by training frequency")
    tasks: Paths = Field(default_factory=list, description="lm-eval tasks")
    task_data: UserPath | None = Field(default=None, description="folder with the tasks' files")
    limit: PositiveInt | None = Field(default=None, description="samples a task")


class StudyConfig(Strict):
    """One study: `leviathan study plan STUDY.yaml`."""

    title: str = Field(min_length=1, description="stands on the report")
    question: str = Field(min_length=1, description="what the study is to answer")
    caution: str = Field(default="", description="what a study of this size cannot show")
    out: UserPath = Field(description="folder of all its runs")
    run: str | None = Field(default=None, description="run configuration, beside this file")
    set: Changes = Field(default_factory=dict, description="changes to every run")
    baseline: str = Field(description="the arm that the others are compared with")
    arms: Arms = Field(default_factory=dict, description="name → changes; in this order")
    groups: dict[str, GroupConfig] = Field(default_factory=dict)
    seeds: list[Annotated[int, Field(ge=0)]] = Field(
        default=[1234], min_length=1, description="replicates of every arm"
    )
    sweep: Sweep = Field(default_factory=dict, description="key → values, every combination")
    tokens_per_parameter: PositiveFloat | None = Field(
        default=None, description="budget by the baseline's parameters, in place of train.steps"
    )
    text: TextConfig | None = None
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    launch: str = Field(default="", description="launcher, e.g. deepspeed --num_accelerators 8")
    machine: MachineConfig = Field(default_factory=MachineConfig)

    @model_validator(mode="after")
    def _each_group_is_whole(self) -> "StudyConfig":
        faults = []
        for name, group in self.all_groups().items():
            where = f"groups.{name}" if name else "the study"
            arms = group.arms or self.arms
            if not arms:
                faults.append(f"{where} has no arms")
            elif (baseline := group.baseline or self.baseline) not in arms:
                faults.append(f"{where}: baseline {baseline!r} is none of {', '.join(arms)}")
            if not (group.run or self.run):
                faults.append(f"{where} has no `run` (a run configuration to begin with)")
        for what in ("seed", "run_dir"):
            if any(what in changes for changes in self._all_changes()):
                faults.append(f"{what} cannot be set: it follows from the study")
        if len(set(self.seeds)) < len(self.seeds):
            faults.append(f"seeds are given twice: {self.seeds}")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def all_groups(self) -> dict[str, GroupConfig]:
        """The groups; one without a name where none is given."""
        return self.groups or {"": GroupConfig()}

    def _all_changes(self) -> list[dict[str, Any]]:
        groups = list(self.groups.values())
        arms = [self.arms, *(group.arms or {} for group in groups)]
        changes = [own for group in arms for own in group.values()]
        return [self.set, self.sweep, *(group.set for group in groups), *changes]
