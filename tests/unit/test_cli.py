"""The command line's own promises: help that teaches, one message and exit 2 for wrong input."""

import json
import os
import subprocess
import sys

import pytest

COMMANDS = [
    ["prep"],
    ["params"],
    ["check"],
    ["train"],
    ["launch"],
    ["perplexity"],
    ["frequency"],
    ["eval"],
    ["report"],
    ["fit"],
    ["inspect"],
    ["experiment", "plan"],
    ["experiment", "run"],
    ["export"],
    ["import"],
    ["generate"],
    ["tokenizer", "train"],
    ["data", "info"],
    ["data", "merge"],
    ["data", "show"],
    ["data", "split"],
    ["data", "verify"],
    ["checkpoint", "ls"],
    ["checkpoint", "verify"],
]


def leviathan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leviathan", *arguments]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command):
    from typer.testing import CliRunner

    from leviathan.cli import app

    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert len(result.output.splitlines()) > 8


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["params", "configs/model/nowhere.yaml"], "config.not_found"),
        (["params", "configs/model/400m.yaml", "model.d_mode=3"], "did you mean model.d_model?"),
        (["train", "configs/run/quickstart.yaml", "train.steps=0"], "greater than 0"),
        (["check", "configs/run/quickstart.yaml", "--device", "tpu"], "cpu, a100"),
        (["data", "info", "no/such/folder"], "no/such/folder"),
        (["perplexity", "no/such/run", "no/such/data"], "no/such/run"),
        (["export", "no/such/run", "out"], "no/such/run"),
        (["report", "no/such/run", "--out", "out"], "no/such/run"),
        (["fit", "no/such.csv"], "[fit.table_not_found] no/such.csv"),
        (["inspect", "no/such/run"], "no/such/run"),
        (["experiment", "plan", "no/such.yaml"], "config.not_found"),
        (
            ["experiment", "plan", "configs/experiments/seeds.yaml", "sedes=[1]"],
            "did you mean seeds?",
        ),
        (["parms"], "Did you mean 'params'?"),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(arguments, expected):
    result = leviathan(*arguments)
    assert result.returncode == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


RUN = ["train", "configs/run/quickstart.yaml"]


@pytest.mark.parametrize(
    ("arguments", "rank", "expected"),
    [
        (
            ["prep", "nofile.yaml", "executor=rank"],
            "1",
            "error: [config.not_found] nofile.yaml",
        ),
        (
            ["data", "verify", "no/such/folder"],
            "1",
            "error: [dataset.not_found] no dataset at no/such/folder",
        ),
        (
            ["data", "merge", "no/such/folder"],
            "x",
            "error: [merge.no_slices] no/such/folder",
        ),
        ([*RUN, "train.steps=0"], "0", "greater than 0"),
        ([*RUN, "train.steps=0"], "1", None),  # rank 0 says the same
        (RUN, "x", "RANK=x: expected an integer"),
        (
            RUN,
            "7",
            "error: [launch_env.invalid] rank 7: environment variable RANK=7: expected",
        ),
    ],
)
def test_each_process_tells_its_own_errors(arguments, rank, expected):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = leviathan(*arguments, RANK=rank, WORLD_SIZE="2", **address)
    assert result.returncode == 2
    assert expected in result.stderr if expected else not result.stderr


def test_json_is_the_last_line_of_standard_output():
    result = leviathan("params", "configs/model/400m.yaml", "model.embedding.kind=tied", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout.splitlines()[-1])["total"] == 406_537_216
