"""A rank that dies or hangs: the remaining ranks exit soon, name it, and leave no files."""

import os
import signal
import time
from pathlib import Path

import pytest
from runs import finish, gone, launched, signal_when_at

# Seconds: a dead process is noticed at once, and named a second later; then the launcher ends. A
# busy machine is slower, and the deepspeed launcher gives a stopped rank 30 s.
SOON_S = 30
LONG = ("train.steps=20000", "checkpoint.every=0", "train.eval_every=0")

CASES = {
    "deepspeed, rank 1 killed": ("deepspeed", signal.SIGKILL, 1, "disconnected"),
    "torchrun, rank 0 killed": ("torchrun", signal.SIGKILL, 0, "disconnected"),
    "torchrun, rank 1 stopped": ("torchrun", signal.SIGSTOP, 1, "sent no heartbeat for 3 s"),
    "deepspeed, rank 0 stopped": ("deepspeed", signal.SIGSTOP, 0, "sent no heartbeat for 3 s"),
}


def shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize(
    "case",
    [
        "deepspeed, rank 1 killed",
        "torchrun, rank 1 stopped",
        *(
            pytest.param(case, marks=pytest.mark.heavy)
            for case in ("torchrun, rank 0 killed", "deepspeed, rank 0 stopped")
        ),
    ],
)
def test_the_others_end_and_name_the_missing(run_file, case):
    launcher, number, victim, how = CASES[case]
    run_dir = run_file.parent / case.replace(", ", "-").replace(" ", "-")
    settings = (f"run_dir={run_dir}", "engine.kind=fsdp2", "parallel.heartbeat_timeout_s=3", *LONG)
    before = shared_memory()
    with launched(launcher, run_file, *settings) as process:
        ranks = signal_when_at(run_dir, 12, number, victim)
        lost_at = time.monotonic()
        while not gone(ranks[1 - victim]):
            assert time.monotonic() - lost_at < SOON_S, "the other rank is still running"
            time.sleep(0.05)
        ended_after = time.monotonic() - lost_at
        if number == signal.SIGSTOP:
            os.kill(ranks[victim], signal.SIGKILL)  # else its launcher waits half a minute for it
        status, errors = finish(process)
    print(f"{case}: the other rank ended after {ended_after:.1f} s")
    assert status != 0
    assert f"error: [parallel.rank_lost] rank {1 - victim} of 2: rank {victim} on " in errors, (
        errors
    )
    assert how in errors
    assert f"resume from the latest checkpoint in {run_dir}" in errors
    assert all(gone(pid) for pid in ranks)
    assert shared_memory() <= before
