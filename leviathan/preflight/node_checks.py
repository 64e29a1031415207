"""Checks of the nodes: hosts, port and shared memory."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from leviathan.console import progress_bar
from leviathan.formatting import format_bytes
from leviathan.launch.commands import SSH_OPTIONS, train_script
from leviathan.launch.hosts import Host
from leviathan.preflight.report import Report

CONNECT_S = 10
AT_ONCE = 32
SHARED = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 30  # enough for NCCL with eight ranks
# Files that killed processes of mosaicml-streaming, NCCL and torch leave.
LEFTOVERS = re.compile(
    r"\d{6}_(locals|barrier|next_epoch|cache_usage|shard_states|shard_access_times|resume"
    r"|epoch_shape|epoch_data)|nccl-.+|torch_\d+_.+"
)


def check_hosts(report: Report, hosts: Sequence[Host]) -> None:
    """Checks that each host of a hostfile answers over ssh and has this program at these paths."""
    away = [host for host in hosts if not host.is_here]
    with progress_bar("hosts", total=len(away)) as bar, ThreadPoolExecutor(AT_ONCE) as pool:
        problems = []
        for problem in pool.map(_ask, away):
            bar.advance(1)
            problems += [problem] if problem else []
    if problems:
        report.add("hosts", "error", "; ".join(problems))
    else:
        found = "all answer and have this program" if away else "only this machine"
        report.add("hosts", "ok", f"{len(hosts)} in the hostfile: {found}")


def _ask(host: Host) -> str | None:
    """The problem with a host; None if there is none."""
    try:
        socket.getaddrinfo(host.name, None)
    except OSError as error:
        return f"{host.name}: {error.strerror or error}: correct its name, or add it to /etc/hosts"
    paths = (sys.executable, str(Path(train_script()).absolute()))
    tests = " && ".join(f"test -e {shlex.quote(path)}" for path in paths)
    options = (*SSH_OPTIONS, "-o", f"ConnectTimeout={CONNECT_S}")
    command = ["ssh", *options, host.name, tests]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=3 * CONNECT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return "ssh: not installed on this machine"
    except subprocess.TimeoutExpired:
        return f"{host.name}: no answer over ssh in {3 * CONNECT_S} s"
    if done.returncode == 0:
        return None
    if done.returncode == 1:
        missing = " or ".join(paths)
        return f"{host.name}: {missing} does not exist there: use the same paths on all nodes"
    errors = done.stderr.strip().splitlines()
    return f"{host.name}: ssh: {errors[-1] if errors else f'status {done.returncode}'}"


def check_port(report: Report, port: int, hosts: Sequence[Host]) -> None:
    """Checks that the master port is free, if the master is this machine."""
    if hosts and not (hosts[0].is_here or hosts[0].name == socket.gethostname()):
        report.add("port", "ok", f"{port} on {hosts[0].name}: not checked from this machine")
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        report.add(
            "port", "error", f"{port}: {error.strerror}{_holder(port)}: choose another --port"
        )
    else:
        report.add("port", "ok", f"{port} is free")


def _holder(port: int) -> str:
    """The process that listens on the port, where the system reports it."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr[1] == port and connection.pid:
                return f", by {psutil.Process(connection.pid).name()} ({connection.pid})"
    return ""


def check_shared_memory(report: Report, folder: Path = SHARED) -> None:
    """Checks the free space of /dev/shm, and files that killed processes left there."""
    if not folder.is_dir():
        return
    used = _mapped(folder)
    names = [path for path in folder.iterdir() if LEFTOVERS.fullmatch(path.name)]
    stale = [path for path in names if str(path) not in used]
    taken = 0
    for path in stale:
        with suppress(OSError):
            taken += path.stat().st_size
    free = shutil.disk_usage(folder).free
    report.figures["stale_shared_memory"] = {"files": len(stale), "bytes": taken}
    if stale:
        shown = ", ".join(sorted(path.name for path in stale)[:3])
        report.add(
            "shared memory",
            "warning",
            f"{len(stale)} unused file(s) in {folder} ({format_bytes(taken)}: {shown}…). Remove "
            "them; they do not affect this run, but other users of mosaicml-streaming",
        )
    elif free < MIN_SHARED_BYTES:
        report.add(
            "shared memory",
            "warning",
            f"{format_bytes(free)} free in {folder}; NCCL may need more. Start the container with "
            "--shm-size=8g.",
        )
    else:
        report.add("shared memory", "ok", f"{format_bytes(free)} free in {folder}, no unused files")


def _mapped(folder: Path) -> set[str]:
    """Files of the directory that processes have mapped or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            found |= {f"{folder}{line.partition(str(folder))[2]}" for line in lines
                      if str(folder) in line}  # fmt: skip
        with suppress(OSError):
            found |= {str(link.readlink()) for link in (process / "fd").iterdir()}
    return found
