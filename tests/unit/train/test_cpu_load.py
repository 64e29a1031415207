"""Shares of the CPU's time, from what the system counts."""

import os
import socket

import psutil
import pytest

from leviathan.train.step_timer import CpuLoad, CpuTimes, local_pids, read_cpu_times

CORES = psutil.cpu_count() or 1


def load(*times):
    reads = iter(times)
    return CpuLoad([], lambda pids: next(reads))


def test_what_the_ranks_have_not_used_others_have():
    found = load(CpuTimes(0, 0, 0), CpuTimes(10 * CORES, CORES, 4 * CORES)).figures()
    assert found["cpu_busy"] == pytest.approx(0.9)
    assert found["cpu_others"] == pytest.approx(0.5)


def test_alone_there_are_no_others():
    found = load(CpuTimes(0, 0, 0), CpuTimes(10 * CORES, CORES, 9.2 * CORES)).figures()
    assert found["cpu_others"] == 0  # rounding does not make it negative


def test_less_than_a_second_is_counted_to_the_next_line():
    one = load(
        CpuTimes(0, 0, 0),
        CpuTimes(0.5 * CORES, 0, 0),
        CpuTimes(2 * CORES, CORES, 0),
    )
    assert one.figures() == {}
    assert one.figures() == {"cpu_busy": 0.5, "cpu_others": 0.5}


def test_the_real_counters():
    first = read_cpu_times([os.getpid()])
    sum(n * n for n in range(2_000_000))
    then = read_cpu_times([os.getpid(), 2**22 + 1])  # a process that is gone counts for nothing
    assert then.own > first.own
    assert 0 < then.idle < then.total


def test_ranks_of_other_hosts_are_not_looked_up_here():
    here = socket.gethostname()
    assert local_pids({"pid": [1, 2, 3], "host": [here, "elsewhere", here]}) == [1, 3]
