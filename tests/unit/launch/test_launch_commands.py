"""The exact commands that a request leads to, and what of them a shell along the way leaves."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from errors import raises_error
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from leviathan.cli import app
from leviathan.errors import ConfigError
from leviathan.launch.commands import Request, commands, quoted_for_pdsh, train_script
from leviathan.launch.hosts import Host
from leviathan.launch.start import exported_environment

ROOT = Path(__file__).parents[3]
RUN = str(ROOT / "configs/run/quickstart.yaml")
TWO = (Host("node1", 2), Host("node2", 2))
ARGUMENTS = (RUN, "train.steps=5", "optim.betas=[0.9, 0.95]")
PYTHON, SCRIPT = sys.executable, train_script()


def request(launcher, **fields):
    return Request(ARGUMENTS, launcher, **fields)


def only(launcher, **fields):
    (command,) = commands(request(launcher, **fields))
    return command


def test_one_machine():
    deepspeed = only("deepspeed", ranks=2, port=4321)
    assert deepspeed.argv == (
        *(PYTHON, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"),
        *("--master_port", "4321", SCRIPT, *ARGUMENTS),
    )
    torchrun = only("torchrun", max_restarts=1, port=4321)
    assert torchrun.argv == (
        *(PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "gpu"),
        *("--master-addr", "127.0.0.1", "--master-port", "4321", "--max-restarts", "1"),
        *(SCRIPT, *ARGUMENTS),
    )


def test_two_jobs_on_one_host_get_different_ports():
    ports = {only("torchrun", ranks=2).argv[8] for _ in range(3)}
    assert len(ports) > 1
    assert ports.isdisjoint({"29500"})


def test_deepspeed_over_pdsh_is_one_command_with_ssh_that_notices(monkeypatch):
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-F mine")
    command = only("deepspeed", hosts=TWO, hostfile=Path("hosts"))
    assert command.host is None
    assert "--hostfile hosts --master_addr node1 --master_port 29500" in str(command)
    assert "--launcher pdsh --force_multi" in str(command)
    assert command.environment["PDSH_SSH_ARGS_APPEND"].endswith("-o ServerAliveCountMax=3 -F mine")
    assert command.argv[-1] == "optim.betas=[0.9, 0.95]"


def test_deepspeed_over_ssh_and_torchrun_are_one_command_a_host():
    first, second = commands(request("deepspeed", hosts=TWO, hostfile=Path("h"), remote="ssh"))
    assert (first.host, second.host) == TWO
    assert "--no_ssh --node_rank 1" in str(second)
    assert second.argv[-3:] == ARGUMENTS
    static = commands(request("torchrun", hosts=TWO))
    assert "--nnodes 2 --node-rank 1 --master-addr node1" in str(static[1])
    assert "--nproc-per-node 2" in str(static[1])
    elastic = commands(request("torchrun", hosts=TWO, max_restarts=3))
    assert "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint node1:29500" in str(elastic[1])
    assert str(elastic[1]).startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ")
    assert "is_host=1" in str(elastic[0])
    assert "is_host=0" in str(elastic[1])


def test_slurm():
    command = only("slurm", nodes=4, ranks=8)
    script = SCRIPT.replace("train.py", "train.sbatch")
    expected = ("sbatch", "--nodes", "4", "--ntasks-per-node", "8", script, *ARGUMENTS)
    assert command.argv == expected


@pytest.mark.parametrize(
    ("launcher", "fields", "expected"),
    [
        ("deepspeed", {"max_restarts": 1}, "--max-restarts"),
        ("deepspeed", {"nodes": 2}, "--nodes"),
        ("torchrun", {"hosts": TWO, "ranks": 2}, "--ranks and --hostfile"),
        ("slurm", {"hosts": TWO}, "--hostfile"),
    ],
)
def test_what_does_not_fit_is_refused(launcher, fields, expected):
    with raises_error("cli.conflicting_options", expected, error=ConfigError):
        commands(request(launcher, **fields))


PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=20)


@given(PRINTABLE.filter(lambda text: "\x7f" not in text))
@example("a=$(touch x)")
@example("a=$HOME `id` b")
@example("a='q' \"d\"")
@example("a=100%h")
@example("a=\\ \\n")
@example("a=*;ls")
def test_an_argument_arrives_over_pdsh_as_it_is(argument):
    quoted = quoted_for_pdsh(argument)
    if " " in quoted:  # what DeepSpeed's pdsh runner does
        quoted = '"{}"'.format(quoted.replace('"', '\\"'))
    shown = subprocess.run(  # pdsh, and a shell
        ["sh", "-c", f"printf %s {quoted.replace('%%', '%')}"], capture_output=True, check=True
    )
    assert shown.stdout.decode() == argument


def invoke(*words):
    from leviathan.errors import LeviathanError

    result = CliRunner().invoke(app, ["launch", RUN, *words])
    if isinstance(result.exception, LeviathanError):
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_shows_and_refuses(tmp_path):
    (tmp_path / "two").write_text("node1 slots=2\nnode2 slots=2\n")
    (tmp_path / "many").write_text("node1 slots=64\n")
    two = str(tmp_path / "two")
    shown = invoke("--hostfile", two, "--remote", "ssh", "--dry-run", "train.steps=50")
    assert shown.startswith("# on node1\n")
    commands_shown = [line for line in shown.splitlines() if not line.startswith("#")]
    assert [shlex.split(line)[-1] for line in commands_shown] == ["train.steps=50"] * 2
    profiled = invoke("--dry-run", "--ranks", "2", "--profile", "steps=3-4", "--memory-snapshot")
    assert shlex.split(profiled)[-3:] == ["--profile", "steps=3-4", "--memory-snapshot"]
    assert "expected steps=FIRST-LAST" in invoke("--dry-run", "--profile", "3-4")
    assert "#SBATCH --requeue" in invoke("--launcher", "slurm", "--dry-run", "--ranks", "2")
    refused = invoke("--hostfile", str(tmp_path / "many"), "--dry-run")
    assert "over 64 data-parallel ranks" in refused
    assert "expected one of deepspeed" in invoke("--launcher", "mpi")
    assert "expected pdsh or ssh" in invoke("--remote", "rsh")
    assert "train.stepz" in invoke("train.stepz=5")


def test_what_every_host_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\n\nA=b=c\n")
    found = exported_environment(tmp_path)
    assert (found["NCCL_DEBUG"], found["A"]) == ("WARN", "b=c")
    assert "SECRET" not in found
    (tmp_path / ".deepspeed_env").write_text("A=1\nhf_abc\n")
    with raises_error("launch.invalid_environment", "deepspeed_env:2", "NAME=value") as caught:
        exported_environment(tmp_path)
    assert "hf_abc" not in str(caught.value)
    (tmp_path / ".deepspeed_env").write_text("A=1\nexport B=2\n")
    with raises_error("launch.invalid_environment", "deepspeed_env:2", "NAME", "export B"):
        exported_environment(tmp_path)
