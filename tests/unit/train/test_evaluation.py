"""Evaluation while a model is trained: the figures of `leviathan eval`, and training unmoved."""

import json
import random

import numpy as np
import pytest
import torch
from errors import raises_error

from leviathan.config.plan import RunPlan
from leviathan.evaluate.harness.model import run_tasks
from leviathan.evaluate.in_loop import preserved_rng_state
from leviathan.evaluate.perplexity import perplexity

TOLERANCE = 1e-6  # nats a token: other batches, so other sums


@pytest.fixture
def task_data(tmp_path):
    """The files of `next_line`."""
    choices = [" return 1", " class", " json"]
    lines = [
        {"context": f"def f{number}(self):\n", "choices": choices, "answer": number % 3}
        for number in range(5)
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "choices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("engine", [{"kind": "fsdp2"}, {"kind": "deepspeed", "zero_stage": 2}])
def test_training_is_as_without_and_figures_as_afterwards(
    run_config, trained, task_data, tiny_dataset, engine
):
    plain = trained(run_config("plain", engine=engine, train={"log_every": 1}))
    config = run_config(
        "evaluated",
        engine=engine,
        train={"log_every": 1, "eval_every": 3},
        evaluate={"tasks": ["next_line"], "every": 4, "task_data": str(task_data)},
    )
    log = trained(config)
    same = ("step", "loss", "grad_norm", "tokens")
    losses = [[line[key] for key in same] for line in log if "loss" in line]
    assert losses == [[line[key] for key in same] for line in plain if "loss" in line]

    validated = [line for line in log if "val_loss" in line]
    assert [line["step"] for line in validated] == [3, 6, 8]
    afterwards = perplexity(config.run_dir, tiny_dataset)
    last = validated[-1]
    assert last["val_loss"] == pytest.approx(afterwards["nats_per_token"], abs=TOLERANCE)
    expected = {name: part["nats_per_token"] for name, part in afterwards["by_subset"].items()}
    assert last["val_loss_by_subset"] == pytest.approx(expected, abs=TOLERANCE)
    assert len(expected) == 2

    scored = [line for line in log if "tasks" in line]
    assert [line["step"] for line in scored] == [4, 8]
    filed = config.run_dir / "evaluation/step-00000008/lm_eval.json"
    in_loop = json.loads(filed.read_text())
    after = run_tasks(config.run_dir, ["next_line"], task_data)
    assert in_loop["results"] == after["results"]
    assert in_loop["leviathan"]["checkpoint"] == after["leviathan"]["checkpoint"]
    assert scored[-1]["tasks"]["next_line/acc"] == after["results"]["next_line"]["acc,none"]


def test_what_cannot_be_run_is_told_before_training(run_config, trained, task_data):
    config = run_config(evaluate={"tasks": ["next_line"], "task_data": str(task_data)})
    (task_data / "choices.jsonl").rename(task_data / "other.jsonl")
    with raises_error("tasks.not_found", "choices.jsonl"):
        trained(config)
    assert not config.run_dir.exists()
    unknown = run_config(evaluate={"tasks": ["next_lime"], "task_data": str(task_data)})
    with raises_error("tasks.unknown", "next_line"):
        trained(unknown)


def test_tasks_are_due_where_there_are_some(run_config):
    every = RunPlan(run_config(evaluate={"tasks": ["piqa"], "every": 3}), 1)
    assert [step for step in range(1, 9) if every.is_due("tasks", step)] == [3, 6, 8]
    at_the_end = RunPlan(run_config(evaluate={"tasks": ["piqa"]}), 1)
    assert [step for step in range(1, 9) if at_the_end.is_due("tasks", step)] == [8]
    never = RunPlan(run_config(evaluate={"every": 3}), 1)
    assert not any(never.is_due("tasks", step) for step in range(1, 9))


def test_what_draws_inside_is_not_seen_outside():
    def draws():
        return random.random(), np.random.rand(), torch.rand(1).item()

    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draws()
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    with preserved_rng_state():
        assert draws() == expected
    assert draws() == expected
