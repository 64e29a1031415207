"""The rank of this process and its environment, for every supported launcher."""

import ctypes
import os
import platform
import random
import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from leviathan.errors import LocalRankError

# Linux assigns ports from 32768 upwards to outgoing connections, so that a lower port is not taken
# by one between its selection and the moment at which a rank listens on it.
PORTS = range(10000, 32768)


def free_port() -> int:
    """Returns a random TCP port of this machine on which no process listens."""
    draw = random.SystemRandom()  # two processes with the same seed must not choose the same port
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


@dataclass(frozen=True)
class LaunchEnv:
    """The rank of this process and the number of ranks, globally and on this node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def read_launch_env(environ: MutableMapping[str, str] | None = None) -> LaunchEnv:
    """Reads the environment variables set by deepspeed, torchrun or srun.

    Without a launcher the world size is 1. In that case, and under srun, the variables required by
    torch.distributed are set.

    Raises:
        LocalRankError: some of the launcher's variables are missing, or one is invalid.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        environ.update(_from_srun(environ))
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environ]
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    elif missing:
        raise LocalRankError(
            "launch_env.incomplete",
            f"the launcher must set all of {', '.join(needed)}, but {', '.join(missing)} are "
            "missing. Start the run with `deepspeed` or `torchrun`, or unset all of them to run "
            "on one rank",
        )
    world_size = _number(environ, "WORLD_SIZE", 1, 2**31 - 1)
    rank = _number(environ, "RANK", 0, world_size - 1)
    _number(environ, "MASTER_PORT", 1, 65535)
    environ.setdefault("LOCAL_RANK", str(rank))
    # torchrun and the deepspeed launcher use different names for the number of ranks per node.
    local = next((n for n in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environ.get(n)), "WORLD_SIZE")
    local_world_size = _number(environ, local, 1, world_size)
    local_rank = _number(environ, "LOCAL_RANK", 0, world_size - 1)
    return LaunchEnv(rank, local_rank, world_size, local_world_size)


def _number(environ: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    text = environ[name]
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise LocalRankError(
            "launch_env.invalid",
            f"environment variable {name}={text}: expected an integer from {lowest} to "
            f"{highest}, set by the launcher. Unset it to run on one rank",
        )
    return int(text)


def _from_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch.distributed, from those of a Slurm step with several tasks.

    Empty otherwise. An allocation (salloc, a batch script) without a step runs one rank.

    Source: srun(1), "Output environment variables"; only a step has SLURM_STEP_NUM_TASKS.
    """
    if environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return {}
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    missing = [name for name in needed if name not in environ]
    # The first host of a list such as "node[007-012,15],other" or "a1,a2".
    host = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", environ.get(needed[2], ""))
    if missing or not host:
        raise LocalRankError(
            "launch_env.incomplete",
            f"srun started {environ['SLURM_STEP_NUM_TASKS']} tasks, but "
            f"{', '.join(missing) or needed[2]} is missing or invalid. Start the ranks with "
            "`srun torchrun …`, one torchrun per node",
        )
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1, 2**31 - 1)
    nodes = _number({"SLURM_STEP_NUM_NODES": "1", **environ}, "SLURM_STEP_NUM_NODES", 1, tasks)
    # All ranks must derive the same port, so it comes from a hash of the job and step ids.
    port = (
        20000
        + zlib.crc32(f"{environ['SLURM_JOB_ID']} {environ.get('SLURM_STEP_ID')}".encode()) % 10000
    )
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(-(-tasks // nodes)),
        "MASTER_ADDR": environ.get("MASTER_ADDR", "".join(part or "" for part in host.groups())),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def limit_threads(env: LaunchEnv) -> None:
    """Divides the node's cores among its ranks, unless the user set OMP_NUM_THREADS.

    Otherwise every rank would start one thread per core. torchrun's default of one thread is not
    treated as a user's setting.
    """
    chosen = os.environ.get("OMP_NUM_THREADS")
    torchruns_default = chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if chosen is None or torchruns_default:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // env.local_world_size))


def host_name() -> str:
    """The name of the hardware: the GPU, or the CPU and its number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    named = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = next(
            (line.partition(":")[2] for line in lines if line.startswith("model name")), ""
        )
    cores = len(os.sched_getaffinity(0))
    return f"{' '.join(named.split()) or platform.machine()}, {cores} cores"


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory instead of returning it to the operating system.

    A step on the CPU repeatedly frees and allocates the same large tensors; page faults for them
    take a tenth of its time (`benchmarks/engines.py`). Has no effect without glibc.

    Source: mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_max = -1, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
