"""Which rank is this process, whichever launcher started it?"""

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from leviathan.errors import ConfigError


@dataclass(frozen=True)
class LaunchEnv:
    """This process's place among all the processes of a run."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def read_launch_env(environ: MutableMapping[str, str] | None = None) -> LaunchEnv:
    """Reads what deepspeed or torchrun set; without either, this process is a world of its own.

    In that case the variables torch.distributed needs are set, with a free port.

    Raises:
        ConfigError: only some of the launcher's variables are there.
    """
    environ = os.environ if environ is None else environ
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environ]
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    elif missing:
        raise ConfigError(
            f"the launcher set some of {', '.join(needed)}, but not {', '.join(missing)}: "
            "start the run through `deepspeed` or `torchrun`, or unset them to run alone"
        )
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    environ.setdefault("LOCAL_RANK", str(rank))
    # torchrun and the deepspeed launcher have different names for the ranks of this machine.
    local = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or str(world_size)
    return LaunchEnv(rank, int(environ["LOCAL_RANK"]), world_size, int(local))


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def share_cores(env: LaunchEnv) -> None:
    """Gives each CPU rank its part of the machine's cores, unless the user said how many.

    Without this every rank starts a thread per core and they take turns; torchrun's own default of
    one thread is not a user's choice either.
    """
    chosen = os.environ.get("OMP_NUM_THREADS")
    torchruns_default = chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if chosen is None or torchruns_default:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // env.local_world_size))
