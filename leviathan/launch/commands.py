"""Builds the command of each host from a launch request.

Commands are argument lists, not shell text. The only exception is DeepSpeed's pdsh launcher, which
joins its arguments into one line; `quoted_for_pdsh` quotes them for it.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from leviathan.errors import ConfigError
from leviathan.launch.hosts import Host
from leviathan.parallel.launch_env import free_port

Launcher = Literal["deepspeed", "torchrun", "slurm"]
Remote = Literal["pdsh", "ssh"]
LAUNCHERS: tuple[Launcher, ...] = ("deepspeed", "torchrun", "slurm")
DEFAULT_PORT = 29500
DEEPSPEED = ("-m", "deepspeed.launcher.runner")
TORCHRUN = ("-m", "torch.distributed.run")
# torch 2.14 publishes the address of rank 0 only in the first rendezvous round, and nodes that join
# later wait for it indefinitely; without the shared store it is published in every round.
PUBLISH_AGAIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# ssh without prompts, which detects a lost node within 30 s.
PDSH_OPTIONS = "PDSH_SSH_ARGS_APPEND"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Request:
    """A launch request; `arguments` are RUN.yaml and its overrides."""

    arguments: tuple[str, ...]
    launcher: Launcher
    hostfile: Path | None = None
    hosts: tuple[Host, ...] = ()
    remote: Remote = "pdsh"
    nodes: int = 1  # Slurm only
    ranks: int | None = None  # per host; without a hostfile
    max_restarts: int = 0  # torchrun only; a positive number makes the job elastic
    port: int | None = None  # None: a free port on one host, else DEFAULT_PORT

    @property
    def master_port(self) -> str:
        """The master port; a free port only on one host, as several hosts must agree on it."""
        default = DEFAULT_PORT if self.hosts else free_port()
        return str(default if self.port is None else self.port)

    @property
    def elastic(self) -> bool:
        """Whether the job resumes automatically on the remaining hosts."""
        return self.launcher == "torchrun" and self.max_restarts > 0


@dataclass(frozen=True)
class Command:
    """Arguments of one process and its host; `host` None: this machine, without an agent."""

    argv: tuple[str, ...]
    host: Host | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.argv)])


def train_script() -> str:
    """The path of launch/train.py, relative if it is below the working directory.

    Raises:
        ConfigError: the package is not installed from its repository.
    """
    script = Path(__file__).parents[2] / "launch" / "train.py"
    if not script.is_file():
        raise ConfigError(
            "launch.no_script",
            f"{script}: no such file; install leviathan from its repository (pip install -e)",
        )
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def commands(request: Request) -> list[Command]:
    """One command, or one per host.

    Raises:
        ConfigError: options of the request conflict.
    """
    if request.launcher == "slurm":
        return [_sbatch(request)]
    if request.nodes != 1:
        raise ConfigError(
            "cli.conflicting_options",
            "--nodes requires --launcher slurm. For other launchers, use --hostfile",
        )
    if request.hosts and request.ranks is not None:
        raise ConfigError(
            "cli.conflicting_options",
            "--ranks and --hostfile are mutually exclusive: the hostfile's slots set the number "
            "of ranks per host",
        )
    if request.launcher == "deepspeed":
        if request.max_restarts:
            raise ConfigError(
                "cli.conflicting_options",
                "--max-restarts requires --launcher torchrun: deepspeed does not restart ranks",
            )
        return _deepspeed(request)
    return _torchrun(request)


def _deepspeed(request: Request) -> list[Command]:
    head, script = (sys.executable, *DEEPSPEED), train_script()
    if not request.hosts:
        ranks = () if request.ranks is None else ("--num_accelerators", str(request.ranks))
        port = ("--master_port", request.master_port)
        return [Command((*head, *ranks, *port, script, *request.arguments))]
    first = request.hosts[0].name
    head += ("--hostfile", str(request.hostfile))
    head += ("--master_addr", first, "--master_port", request.master_port)
    if request.remote == "pdsh":
        # Without --force_multi, a hostfile with one host starts the ranks on this machine.
        quoted = tuple(map(quoted_for_pdsh, (script, *request.arguments)))
        argv = (*head, "--launcher", "pdsh", "--force_multi", *quoted)
        options = " ".join((*SSH_OPTIONS, os.environ.get(PDSH_OPTIONS, ""))).rstrip()
        return [Command(argv, environment={PDSH_OPTIONS: options})]
    tail = (script, *request.arguments)
    return [
        Command((*head, "--no_ssh", "--node_rank", str(number), *tail), host)
        for number, host in enumerate(request.hosts)
    ]


def _torchrun(request: Request) -> list[Command]:
    head, tail = (sys.executable, *TORCHRUN), (train_script(), *request.arguments)
    restarts = ("--max-restarts", str(request.max_restarts))
    if not request.hosts:
        # Not --standalone: its rendezvous uses this machine's host name, which may not resolve.
        ranks = ("--nproc-per-node", "gpu" if request.ranks is None else str(request.ranks))
        place = ("--master-addr", "127.0.0.1", "--master-port", request.master_port)
        return [Command((*head, *ranks, *place, *restarts, *tail))]
    first, port, found = request.hosts[0], request.master_port, []
    for number, host in enumerate(request.hosts):
        ranks = ("--nproc-per-node", str(host.slots))
        if request.elastic:
            place = ("--nnodes", f"1:{len(request.hosts)}", "--rdzv-backend", "c10d")
            place += (
                "--rdzv-endpoint",
                f"{first.name}:{port}",
                "--rdzv-id",
                "leviathan",
            )
            # The host of the rendezvous must not depend on name resolution.
            place += ("--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", host.name)
        else:
            place = ("--nnodes", str(len(request.hosts)), "--node-rank", str(number))
            place += ("--master-addr", first.name, "--master-port", request.master_port)
        environment = dict(PUBLISH_AGAIN) if request.elastic else {}
        found.append(Command((*head, *place, *ranks, *restarts, *tail), host, environment))
    return found


def _sbatch(request: Request) -> Command:
    if request.hosts or request.max_restarts:
        raise ConfigError(
            "cli.conflicting_options",
            "--launcher slurm does not support --hostfile and --max-restarts: Slurm chooses the "
            "hosts",
        )
    size = ("--nodes", str(request.nodes))
    if request.ranks is not None:
        size += ("--ntasks-per-node", str(request.ranks))
    script = str(Path(train_script()).with_name("train.sbatch"))
    return Command(("sbatch", *size, script, *request.arguments))


def quoted_for_pdsh(argument: str) -> str:
    """Quotes `argument` so that it passes DeepSpeed, pdsh and the remote shell unchanged.

    DeepSpeed puts arguments with a space in double quotes and escapes only double quotes; pdsh
    expands `%h` and similar sequences; the remote shell interprets the rest.
    """
    within_double = re.sub(r"([\\$`])", r"\\\1", argument)
    quoted = within_double if " " in argument else shlex.quote(argument)
    return quoted.replace("%", "%%")


def world_size(request: Request) -> int | None:
    """The total number of ranks; None if it is unknown before the launch."""
    if request.hosts:
        return sum(host.slots for host in request.hosts)
    return None if request.ranks is None else request.ranks * request.nodes


def as_shell_lines(request: Request, found: Sequence[Command]) -> str:
    """The commands as shell text with their hosts; for Slurm also the batch script."""
    if request.launcher == "slurm":
        script = Path(train_script()).with_name("train.sbatch").read_text()
        return f"{found[0]}\n\n{script.rstrip()}"
    return "\n".join(f"# on {c.host.name}\n{c}" if c.host else str(c) for c in found)
