"""Which rank is this process, whichever launcher started it?"""

import ctypes
import os
import platform
import re
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from leviathan.errors import LocalRankError
from leviathan.parallel.ports import free_port


@dataclass(frozen=True)
class LaunchEnv:
    """This process's place among all the processes of a run."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def read_launch_env(environ: MutableMapping[str, str] | None = None) -> LaunchEnv:
    """Reads what deepspeed, torchrun or srun set; without one, this process is a world of its own.

    In that case, and under srun, the variables torch.distributed needs are set.

    Raises:
        LocalRankError: only some of the launcher's variables are there, or one makes no sense.
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
            f"the launcher set some of {', '.join(needed)}, but not {', '.join(missing)}: "
            "start the run through `deepspeed` or `torchrun`, or unset them to run alone",
        )
    world_size = _number(environ, "WORLD_SIZE", 1, 2**31 - 1)
    rank = _number(environ, "RANK", 0, world_size - 1)
    _number(environ, "MASTER_PORT", 1, 65535)
    environ.setdefault("LOCAL_RANK", str(rank))
    # torchrun and the deepspeed launcher have different names for the ranks of this machine.
    local = next((n for n in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environ.get(n)), "WORLD_SIZE")
    local_world_size = _number(environ, local, 1, world_size)
    local_rank = _number(environ, "LOCAL_RANK", 0, world_size - 1)
    return LaunchEnv(rank, local_rank, world_size, local_world_size)


def _number(environ: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    text = environ[name]
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise LocalRankError(
            "launch_env.invalid",
            f"environment variable {name}={text}: expected a whole number from {lowest} to "
            f"{highest}, as the launcher sets it; unset it to run alone",
        )
    return int(text)


def _from_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """torch.distributed's variables from those of a Slurm step; empty outside one of several tasks.

    An allocation alone (salloc, a batch script) is no step: there a process runs alone.

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
            f"srun started several tasks, but {', '.join(missing) or needed[2]} is not usable: "
            "start the ranks with `srun torchrun …`, one torchrun a machine",
        )
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1, 2**31 - 1)
    nodes = _number({"SLURM_STEP_NUM_NODES": "1", **environ}, "SLURM_STEP_NUM_NODES", 1, tasks)
    # All ranks must know the port, so it is not a free one but one that few others will choose.
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
    """Gives each CPU rank its part of the machine's cores, unless the user said how many.

    Without this every rank starts a thread per core and they take turns; torchrun's own default of
    one thread is not a user's choice either.
    """
    chosen = os.environ.get("OMP_NUM_THREADS")
    torchruns_default = chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if chosen is None or torchruns_default:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // env.local_world_size))


def host_name() -> str:
    """What a speed was measured on: the accelerator, or the processor and its cores."""
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
    """Has malloc keep what is freed instead of giving it back to the system.

    A step on the CPU frees and takes the same large tensors again and again; asking the system for
    them again, page by page, is a tenth of it (`benchmarks/engines.py`). Elsewhere than under glibc
    nothing is done.

    Source: mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_max = -1, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
