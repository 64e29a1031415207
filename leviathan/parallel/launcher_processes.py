"""The launcher's processes above a rank, so that the rank notices when they are gone."""

import os
from collections.abc import Mapping
from pathlib import Path


def launcher_processes(environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Process ids of what started this rank, nearest first; another result later means one is gone.

    Empty without a launcher: a run put into the background may well outlive its shell. Of torchrun
    it is the parent. The deepspeed command starts a process that starts the ranks, and passes no
    signal on to it: kill the command, and the others continue, so both are named.
    """
    if "LOCAL_SIZE" in environ:
        parent = os.getppid()
        return parent, _parent_of(parent)
    if "TORCHELASTIC_RUN_ID" in environ:
        return (os.getppid(),)
    return ()


def _parent_of(pid: int) -> int:
    """A process's parent; 0 where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # "pid (name) state parent …"
