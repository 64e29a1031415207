"""What `leviathan launch` runs on each host, at the other end of ssh: one command, never orphans.

Standard input brings one line of JSON, `{"argv", "cwd", "environment"}`, and then the names of
signals for the ranks, one a line. Its end means that the launcher or the way to it is gone: the
ranks are told to save, and a while later everything that was started here is killed. This file is
run by its path and needs nothing but the standard library and psutil.
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

GRACE_PERIOD_S = 90.0  # for ranks that save after their launcher is gone
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def ranks() -> list[psutil.Process]:
    """Those processes below this one that hold a rank, and not what they started themselves."""
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
    """Passes signals on for as long as somebody is at the other end."""
    for line in sys.stdin:
        with suppress(KeyError):
            send(line.strip())
    send("SIGTERM")
    try:
        child.wait(GRACE_PERIOD_S)
    except subprocess.TimeoutExpired:
        child.kill()


def main() -> int:
    """Runs the command to its end and leaves nothing behind; its exit status."""
    # What loses its parent becomes our child: torchrun gives every rank a session of its own.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    spec = json.loads(sys.stdin.readline())
    # Unix's default for a broken pipe would end us before the ranks, once no one reads our output.
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
