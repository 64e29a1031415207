"""Evaluations under a launcher: several ranks compute the same results as one."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from ranks import run_ranks
from runs import LAUNCHERS, PATIENCE_S, REPOSITORY, finish, launched

from leviathan.errors import DataError, LeviathanError
from leviathan.evaluate.scoring import join_ranks
from leviathan.parallel.launch_env import free_port

ITEMS = [
    ("import re\n", ["import json", "pass"]),
    ("def wrap(text):\n", ["    return text", "class", "    pass"]),
    ("class A:\n    pass\n\n\nclass", [" B:", " def", "\n"]),
    ("x", [" = 1", " = [", " in", " y z"]),
    ("for line in lines:\n", ["    yield line", "x"]),
]
GENERATING = """
task: continue
dataset_path: json
dataset_kwargs: {data_files: {test: ${task_data}/choices.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: context
doc_to_target: answer
generation_kwargs: {until: ["x"], max_gen_toks: 5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def trained(run_file):
    """A few steps of ZeRO-3 on two ranks: slices of flat partitions instead of full tensors."""
    run = yaml.safe_load(run_file.read_text())
    run |= {"run_dir": str(run_file.parent / "zero3")}
    run["engine"] = {"kind": "deepspeed", "zero_stage": 3}
    run["train"] |= {"steps": 4, "eval_every": 0}
    run["optim"]["warmup_steps"] = 1
    file = run_file.parent / "zero3.yaml"
    file.write_text(yaml.safe_dump(run))
    with launched("torchrun", file) as process:
        status, errors = finish(process)
    assert status == 0, errors
    return run["run_dir"], run["data"]["path"]


def shared_work():
    """What one rank of several sees of work, of streams, and of an error on another rank."""
    ranks, done = join_ranks(), []

    def square(number):
        done.append(number)
        if number == 99:
            raise DataError("shard.corrupt", "99 is corrupt")
        return number * number

    found = ranks.map(square, range(8))
    streamed = list(ranks.stream(square, iter(range(5))))
    mine = list(done)
    message_text = ""
    try:
        ranks.map(square, [1, 99])
    except LeviathanError as error:
        message_text = f"{type(error).__name__}: {error}"
    return found, streamed, mine, ranks.on_rank_zero(lambda: f"of {ranks.rank}"), message_text


def test_ranks_share_work_and_errors():
    results = run_ranks(shared_work, 3)
    for found, streamed, _, agreed, message_text in results:
        assert found == [number * number for number in range(8)]
        assert streamed == [(number, number * number) for number in range(5)]
        assert agreed == "of 0"
        assert message_text == "DataError: 99 is corrupt"
    assert sorted(results[1][2]) == [1, 1, 4, 4, 7]
    done = [number for _, _, mine, _, _ in results for number in mine]
    assert sorted(done) == sorted([*range(8), *range(5)])


def leviathan(world_size, *arguments):
    """A sub-command by itself or as torchrun's ranks."""
    launcher = []
    if world_size > 1:
        launcher = ["-m", *LAUNCHERS["torchrun"], str(free_port())]
        launcher[launcher.index("2")] = str(world_size)
    return subprocess.run(
        [sys.executable, *launcher, "-m", "leviathan", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def result(world_size, *arguments):
    done = leviathan(world_size, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # on one rank
    return json.loads(line)


@pytest.mark.heavy
def test_loss_of_three_ranks_is_that_of_one(trained, tmp_path):
    run_dir, data = trained
    out = tmp_path / "strata"
    for command in (
        ("perplexity", run_dir, data, "--batch-size", 2),
        ("perplexity", run_dir, data, "--batch-size", 3, "--stride", 20),
        ("frequency", run_dir, "--data", data, "--out", out, "--batch-size", 4),
    ):
        alone = result(1, *command)
        filed = (out / "frequency.json").read_text() if "--out" in command else ""
        assert result(3, *command) == alone
        assert not filed or (out / "frequency.json").read_text() == filed


@pytest.mark.heavy
def test_tasks_of_two_ranks_are_those_of_one(trained, tmp_path):
    lines = [
        json.dumps({"context": context, "choices": choices, "answer": 0})
        for context, choices in ITEMS
    ]
    (tmp_path / "choices.jsonl").write_text("\n".join(lines))
    outs, found = [], []
    for world_size in (1, 2):
        outs.append(tmp_path / str(world_size))
        arguments = ("--tasks", "next_line", "--task-data", tmp_path, "--batch-size", 2)
        found.append(result(world_size, "eval", trained[0], *arguments, "--out", outs[-1]))
    assert found[0]["results"] == found[1]["results"]
    assert found[0]["leviathan"] == found[1]["leviathan"]
    one, two = ((out / "lm_eval_next_line.jsonl").read_text() for out in outs)
    assert one == two
    assert len(one.splitlines()) == len(ITEMS)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "RUN", "--tasks", "hellswag", "--task-data", "."), "did you mean 'hellaswag'"),
        (("perplexity", "RUN", "nowhere"), "nowhere"),
    ],
)
def test_ranks_refuse_with_one_message(trained, arguments, message):
    done = leviathan(2, *(trained[0] if word == "RUN" else word for word in arguments))
    assert done.returncode != 0  # torchrun's own is 1, with its table of failed ranks
    message_text = [line for line in done.stderr.splitlines() if line.startswith("error: [")]
    assert len(message_text) == 1, done.stderr
    assert message in message_text[0]
    assert 'Traceback (most recent call last):\n  File "' + str(REPOSITORY) not in done.stderr
