"""What machines have to offer: the hosts, the port, shared memory."""

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
from leviathan.launch.commands import SSH_OPTIONS, train_script
from leviathan.launch.hosts import Host
from leviathan.preflight.report import Report, size

CONNECT_S = 10
AT_ONCE = 32
SHARED = Path("/dev/shm")
LEAST_SHARED = 1 << 30  # what NCCL takes for eight ranks, with room to spare
# What mosaicml-streaming's own client, NCCL and torch leave behind when they are killed.
LEFT_BEHIND = re.compile(
    r"\d{6}_(locals|barrier|next_epoch|cache_usage|shard_states|shard_access_times|resume"
    r"|epoch_shape|epoch_data)|nccl-.+|torch_\d+_.+"
)


def check_hosts(report: Report, hosts: Sequence[Host]) -> None:
    """Whether each host of a hostfile answers over ssh and has this program under these paths."""
    away = [host for host in hosts if not host.is_here]
    with progress_bar("hosts", total=len(away)) as bar, ThreadPoolExecutor(AT_ONCE) as pool:
        problems = []
        for problem in pool.map(_ask, away):
            bar.advance(1)
            problems += [problem] if problem else []
    if problems:
        report.say("hosts", "red", "; ".join(problems))
    else:
        found = "all answer and have this program" if away else "this machine alone"
        report.say("hosts", "green", f"{len(hosts)} in the hostfile: {found}")


def _ask(host: Host) -> str | None:
    """What is wrong with a host; None if nothing is."""
    try:
        socket.getaddrinfo(host.name, None)
    except OSError as error:
        return f"{host.name}: {error.strerror or error}: mend its name, or list it in /etc/hosts"
    paths = (sys.executable, str(Path(train_script()).absolute()))
    asked = " && ".join(f"test -e {shlex.quote(path)}" for path in paths)
    options = (*SSH_OPTIONS, "-o", f"ConnectTimeout={CONNECT_S}")
    command = ["ssh", *options, host.name, asked]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=3 * CONNECT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return "ssh: no such program on this machine"
    except subprocess.TimeoutExpired:
        return f"{host.name}: no answer over ssh in {3 * CONNECT_S} s"
    if done.returncode == 0:
        return None
    if done.returncode == 1:
        return f"{host.name}: {' or '.join(paths)} is missing there: use the same paths everywhere"
    said = done.stderr.strip().splitlines()
    return f"{host.name}: ssh: {said[-1] if said else f'status {done.returncode}'}"


def check_port(report: Report, port: int, hosts: Sequence[Host]) -> None:
    """Whether the ranks can meet at the master's port, if that is this machine's."""
    if hosts and not (hosts[0].is_here or hosts[0].name == socket.gethostname()):
        report.say("port", "green", f"{port} on {hosts[0].name}: not looked at from here")
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        report.say("port", "red", f"{port}: {error.strerror}{_holder(port)}: choose another --port")
    else:
        report.say("port", "green", f"{port} is free")


def _holder(port: int) -> str:
    """Who listens there, where the system says so."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr[1] == port and connection.pid:
                return f", by {psutil.Process(connection.pid).name()} ({connection.pid})"
    return ""


def check_shared_memory(report: Report, folder: Path = SHARED) -> None:
    """Room in /dev/shm, and what killed processes have left there."""
    if not folder.is_dir():
        return
    used = _mapped(folder)
    names = [path for path in folder.iterdir() if LEFT_BEHIND.fullmatch(path.name)]
    stale = [path for path in names if str(path) not in used]
    taken = 0
    for path in stale:
        with suppress(OSError):
            taken += path.stat().st_size
    free = shutil.disk_usage(folder).free
    report.figures["stale_shared_memory"] = {"files": len(stale), "bytes": taken}
    if stale:
        shown = ", ".join(sorted(path.name for path in stale)[:3])
        report.say(
            "shared memory",
            "amber",
            f"{len(stale)} file(s) in {folder} that no process uses ({size(taken)}: {shown}…): "
            "remove them; a run here is not hindered, other users of mosaicml-streaming may be",
        )
    elif free < LEAST_SHARED:
        report.say(
            "shared memory",
            "amber",
            f"{size(free)} free in {folder}, NCCL may need more: start the container with "
            "--shm-size=8g",
        )
    else:
        report.say("shared memory", "green", f"{size(free)} free in {folder}, nothing stale")


def _mapped(folder: Path) -> set[str]:
    """Files of the folder that processes have mapped or open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            found |= {f"{folder}{line.partition(str(folder))[2]}" for line in lines
                      if str(folder) in line}  # fmt: skip
        with suppress(OSError):
            found |= {str(link.readlink()) for link in (process / "fd").iterdir()}
    return found
