"""The launcher processes above a rank, so that the rank can detect that they have exited."""

import os
from collections.abc import Mapping
from pathlib import Path


def launcher_processes(environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Process ids of this rank's launcher, nearest first; a later change means one has exited.

    Empty without a launcher, because a background run may outlive its shell. For torchrun it is the
    parent. The deepspeed command starts a process that starts the ranks, and does not forward
    signals to it: if the command is killed, that process continues, so both are returned.
    """
    if "LOCAL_SIZE" in environ:
        parent = os.getppid()
        return parent, _parent_of(parent)
    if "TORCHELASTIC_RUN_ID" in environ:
        return (os.getppid(),)
    return ()


def _parent_of(pid: int) -> int:
    """The parent of a process; 0 if it is unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # "pid (name) state parent …"
