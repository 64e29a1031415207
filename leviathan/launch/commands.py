"""What a configuration and a hostfile lead to: the exact command of each host.

Commands are lists of arguments throughout; nothing here is a shell's text but the one line that
DeepSpeed's pdsh launcher makes of its own arguments, for which they are quoted (`quoted_for_pdsh`).
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

Launcher = Literal["deepspeed", "torchrun", "slurm"]
Remote = Literal["pdsh", "ssh"]
LAUNCHERS: tuple[Launcher, ...] = ("deepspeed", "torchrun", "slurm")
DEEPSPEED = ("-m", "deepspeed.launcher.runner")
TORCHRUN = ("-m", "torch.distributed.run")
# torch 2.14 tells where rank 0 is in the first round only, and who joins later waits for that in
# vain; without the shared store it tells so in every round.
PUBLISH_AGAIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# ssh that notices within 30 s that a machine is gone, and never asks.
PDSH_OPTIONS = "PDSH_SSH_ARGS_APPEND"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Request:
    """What the user asks for; `arguments` are RUN.yaml and its changes."""

    arguments: tuple[str, ...]
    launcher: Launcher
    hostfile: Path | None = None
    hosts: tuple[Host, ...] = ()
    remote: Remote = "pdsh"
    nodes: int = 1  # Slurm's
    ranks: int | None = None  # a host; without a hostfile
    max_restarts: int = 0  # torchrun's; more than none makes it elastic
    port: int = 29500

    @property
    def elastic(self) -> bool:
        """Whether the job continues, by itself, with the hosts that are left."""
        return self.launcher == "torchrun" and self.max_restarts > 0


@dataclass(frozen=True)
class Command:
    """Arguments of one process, and where it runs; `host` None is here, without an agent."""

    argv: tuple[str, ...]
    host: Host | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.argv)])


def train_script() -> str:
    """The path of launch/train.py, short where it lies below the working directory.

    Raises:
        ConfigError: the package lies somewhere else than in its repository.
    """
    script = Path(__file__).parents[2] / "launch" / "train.py"
    if not script.is_file():
        raise ConfigError(
            "launch.no_script", f"{script}: missing; install leviathan from its repository (pip -e)"
        )
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def commands(request: Request) -> list[Command]:
    """One command, or one for each host.

    Raises:
        ConfigError: the parts of the request do not fit one another.
    """
    if request.launcher == "slurm":
        return [_sbatch(request)]
    if request.nodes != 1:
        raise ConfigError(
            "cli.conflicting_options", "--nodes is Slurm's: name the hosts in a --hostfile"
        )
    if request.hosts and request.ranks is not None:
        raise ConfigError(
            "cli.conflicting_options",
            "--ranks and --hostfile: the hostfile's slots say how many ranks",
        )
    if request.launcher == "deepspeed":
        if request.max_restarts:
            raise ConfigError(
                "cli.conflicting_options",
                "--max-restarts is torchrun's: deepspeed does not restart ranks",
            )
        return _deepspeed(request)
    return _torchrun(request)


def _deepspeed(request: Request) -> list[Command]:
    head, script = (sys.executable, *DEEPSPEED), train_script()
    if not request.hosts:
        ranks = () if request.ranks is None else ("--num_accelerators", str(request.ranks))
        port = ("--master_port", str(request.port))
        return [Command((*head, *ranks, *port, script, *request.arguments))]
    first = request.hosts[0].name
    head += ("--hostfile", str(request.hostfile))
    head += ("--master_addr", first, "--master_port", str(request.port))
    if request.remote == "pdsh":
        # --force_multi: without it a hostfile of one host starts here, whatever its name.
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
        # Not --standalone: its rendezvous picks a name of this machine, which may lead nowhere.
        ranks = ("--nproc-per-node", "gpu" if request.ranks is None else str(request.ranks))
        place = ("--master-addr", "127.0.0.1", "--master-port", str(request.port))
        return [Command((*head, *ranks, *place, *restarts, *tail))]
    first, found = request.hosts[0], []
    for number, host in enumerate(request.hosts):
        ranks = ("--nproc-per-node", str(host.slots))
        if request.elastic:
            place = ("--nnodes", f"1:{len(request.hosts)}", "--rdzv-backend", "c10d")
            place += ("--rdzv-endpoint", f"{first.name}:{request.port}", "--rdzv-id", "leviathan")
            # Whose rendezvous it is must not hang on how names resolve.
            place += ("--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", host.name)
        else:
            place = ("--nnodes", str(len(request.hosts)), "--node-rank", str(number))
            place += ("--master-addr", first.name, "--master-port", str(request.port))
        environment = dict(PUBLISH_AGAIN) if request.elastic else {}
        found.append(Command((*head, *place, *ranks, *restarts, *tail), host, environment))
    return found


def _sbatch(request: Request) -> Command:
    if request.hosts or request.max_restarts:
        raise ConfigError(
            "cli.conflicting_options",
            "--hostfile and --max-restarts are not Slurm's: it chooses the hosts",
        )
    size = ("--nodes", str(request.nodes))
    if request.ranks is not None:
        size += ("--ntasks-per-node", str(request.ranks))
    script = str(Path(train_script()).with_name("train.sbatch"))
    return Command(("sbatch", *size, script, *request.arguments))


def quoted_for_pdsh(argument: str) -> str:
    """`argument` such that it arrives as it is after DeepSpeed, pdsh and the remote shell.

    DeepSpeed puts what holds a space in double quotes and escapes only those; pdsh replaces `%h`
    and the like; the rest is the shell's.
    """
    within_double = re.sub(r"([\\$`])", r"\\\1", argument)
    quoted = within_double if " " in argument else shlex.quote(argument)
    return quoted.replace("%", "%%")


def world_size(request: Request) -> int | None:
    """Ranks in all, where that is known before the launch."""
    if request.hosts:
        return sum(host.slots for host in request.hosts)
    return None if request.ranks is None else request.ranks * request.nodes


def as_shell_lines(request: Request, found: Sequence[Command]) -> str:
    """The commands as they could be typed, each under its host's name; a Slurm script entire."""
    if request.launcher == "slurm":
        script = Path(train_script()).with_name("train.sbatch").read_text()
        return f"{found[0]}\n\n{script.rstrip()}"
    return "\n".join(f"# on {c.host.name}\n{c}" if c.host else str(c) for c in found)
