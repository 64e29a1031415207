"""`run_ranks`: a function on several gloo ranks of this machine, with errors per rank."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from leviathan.parallel.launch_env import free_port


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180
) -> list[Any]:
    """Runs `fn(*args)` in `world_size` new processes; returns the result of each rank."""
    context = multiprocessing.get_context("spawn")
    port, ranks = free_port(), []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(fn, args, rank, world_size, port, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _results(ranks, timeout)
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def _results(ranks: list[tuple[Any, Connection]], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) < len(ranks) and not failures and time.monotonic() < deadline:
        for rank, (_, connection) in enumerate(ranks):
            if rank in results or not connection.poll(0.05):
                continue
            _receive(rank, connection, results, failures)
    grace = time.monotonic() + 5  # the others fail soon after the first: hear them too
    for rank, (_, connection) in enumerate(ranks):
        unheard = rank not in results and rank not in failures
        if failures and unheard and connection.poll(max(0, grace - time.monotonic())):
            _receive(rank, connection, results, failures)
    missing = [r for r in range(len(ranks)) if r not in results and r not in failures]
    if not failures and missing:
        failures = {rank: f"nothing heard within {timeout} s" for rank in missing}
    failed = "\n".join(f"[rank {rank}] {text}" for rank, text in sorted(failures.items()))
    assert not failures, failed
    return [results[rank] for rank in range(len(ranks))]


def _receive(rank: int, connection: Connection, results: dict, failures: dict) -> None:
    try:
        good, value = connection.recv()
    except EOFError:
        good, value = False, "died without a word"
    (results if good else failures)[rank] = value


def _rank(
    fn: Callable[..., Any], args: tuple, rank: int, world_size: int, port: int, pipe: Connection
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    try:
        pipe.send((True, fn(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
