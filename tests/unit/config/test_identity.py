"""Which keys may change on resume and which do not make another arm: one definition of both."""

import pytest

from leviathan.config.explain import _all_keys
from leviathan.config.identity import (
    KEYS,
    NOT_IN_ARM,
    RESUMABLE,
    STEPS,
    arm_of,
    changed_keys,
    flatten,
    within,
)
from leviathan.config.run import RunConfig


def test_every_key_is_one_of_the_schema() -> None:
    known = {".".join(path) for path in _all_keys(RunConfig)}
    assert {key.name for key in (*KEYS, STEPS)} <= known


def test_what_may_change_on_resume_makes_no_other_arm() -> None:
    assert set(NOT_IN_ARM) - set(RESUMABLE) == {"seed"}


def test_a_section_is_whole_and_a_name_is_no_prefix() -> None:
    assert within("engine.zero_stage", RESUMABLE)
    assert within("engine", RESUMABLE)
    assert not within("engine_of_another_kind", RESUMABLE)
    assert not within("optim.lr", RESUMABLE)


@pytest.mark.parametrize(
    ("there", "here", "changed"),
    [
        ({"engine": {"kind": "fsdp2"}}, {"engine": {"kind": "deepspeed"}}, []),
        ({"optim": {"lr": 1}}, {"optim": {"lr": 2}}, ["optim.lr"]),
        ({"a": {"b": 1}}, {}, ["a.b"]),
        ({"seed": 1}, {"seed": 2}, ["seed"]),
        ({"train": {"steps": 1}}, {"train": {"steps": 2}}, ["train.steps"]),
    ],
)
def test_changed_keys(there, here, changed) -> None:
    assert changed_keys(there, here) == changed


def test_a_constant_schedule_may_be_extended() -> None:
    def config(steps, schedule):
        return {"train": {"steps": steps}, "optim": {"schedule": schedule}}

    assert changed_keys(config(1, "constant"), config(2, "constant")) == []
    assert changed_keys(config(1, "cosine"), config(2, "cosine")) == ["train.steps"]


def test_seeds_of_one_arm() -> None:
    common = {"optim": {"lr": 1e-3}, "model": {"embedding": {"kind": "tied"}}}
    one = common | {"seed": 1, "tracking": {"wandb": {"name": "a"}}, "run_dir": "a"}
    two = common | {"seed": 2, "tracking": {"wandb": {"name": "b"}}, "run_dir": "b"}
    assert arm_of(one) == arm_of(two) == flatten(common)
