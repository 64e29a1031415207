"""The agent that `leviathan launch` runs on each host over ssh: one command, without orphans.

Standard input consists of one line of JSON, `{"argv", "cwd", "environment"}`, and then the names of
signals for the ranks, one per line. End of file means that the launcher or the connection is lost:
the ranks receive SIGTERM to save a checkpoint, and after a grace period all processes started here
are killed. This file is run by its path and uses only the standard library and psutil.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil

GRACE_PERIOD_S = 90.0  # grace period for saving after the launcher is lost
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def ranks() -> list[psutil.Process]:
    """The descendants of this process that are ranks, without the children of ranks."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):  # parents come before children
        with suppress(psutil.Error):
            if "RANK" in process.environ() and process.parent() not in found:
                found.append(process)
    return found


def send(name: str) -> None:
    """Sends a signal to every rank."""
    for process in ranks():
        with suppress(psutil.Error):
            process.send_signal(signal.Signals[name])


def listen(child: subprocess.Popen[bytes]) -> None:
    """Forwards signals until the connection is lost, then ends the ranks."""
    for line in sys.stdin:
        with suppress(KeyError):
            send(line.strip())
    send("SIGTERM")
    try:
        child.wait(GRACE_PERIOD_S)
    except subprocess.TimeoutExpired:
        child.kill()


def main() -> int:
    """Runs the command, kills its remaining descendants, and returns its exit status."""
    # Orphaned processes become our children: torchrun gives every rank its own session.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    spec = json.loads(sys.stdin.readline())
    # The default action would end the agent before the ranks when the ssh session closes.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    child = subprocess.Popen(
        spec["argv"],
        cwd=spec["cwd"],
        env={**os.environ, **spec["environment"]},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=listen, args=(child,), daemon=True).start()
    status = child.wait()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
