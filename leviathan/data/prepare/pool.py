"""Pools, which run independent tasks: interface, serial pool and process pool.

A task is small and states where its result belongs on a (shared) disk; running it again after a
crash gives the same bytes. A pool must therefore only run every task at least once.
"""

import multiprocessing
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from leviathan.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

Advance = Callable[[float], Any]  # called with the progress, in the unit of the work
Work = Callable[[T, Advance], R]


class Pool(Protocol):
    """Interface of a pool."""

    def start(self) -> None:
        """Starts the processes for `run` early, before progress bars are drawn."""
        ...

    def run(
        self,
        work: Work[T, R],
        tasks: Mapping[int, T],
        advance: Advance,
        finish: Callable[[int, R], Any],
    ) -> None:
        """Runs `work(task, advance)` for every task, in any order, several at a time.

        `finish(number, result)` is called in this process as results arrive; an error of a task
        stops all.

        Raises:
            DataError: raised by a task, or a worker died.
        """
        ...


@contextmanager
def open_local_pool(workers: int) -> Iterator[Pool]:
    """Creates a pool of `workers` processes; 1: this process."""
    if workers == 1:
        yield _SerialPool()
    else:
        processes = _ProcessPool(workers)
        try:
            yield processes
        finally:
            processes.close()


class _SerialPool:
    """Runs one task after another in this process."""

    def start(self) -> None:
        pass

    def run(
        self,
        work: Work[T, R],
        tasks: Mapping[int, T],
        advance: Advance,
        finish: Callable[[int, R], Any],
    ) -> None:
        for number, task in tasks.items():
            finish(number, work(task, advance))


class _ProcessPool:
    """Worker processes that start at the first task and are kept until the end."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor: ProcessPoolExecutor | None = None
        self._progress: Any = None

    def run(
        self,
        work: Work[T, R],
        tasks: Mapping[int, T],
        advance: Advance,
        finish: Callable[[int, R], Any],
    ) -> None:
        if len(tasks) < 2:
            _SerialPool().run(work, tasks, advance, finish)
            return
        todo = iter(tasks.items())
        running: dict[Future[R], int] = {}
        try:
            while True:
                # Not all at once: a queued task is pickled, and its result is kept in memory.
                while len(running) < 2 * self._workers and (item := next(todo, None)):
                    running[self._start().submit(_in_worker, work, item[1])] = item[0]
                if not running:
                    return
                ready, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                self._report(advance)
                for future in ready:
                    finish(running.pop(future), future.result())
        except BrokenProcessPool:
            raise DataError(
                "prep.worker_died",
                "a worker process died (out of memory?). Run the same command to resume; if it "
                "fails again, reduce workers",
            ) from None

    def start(self) -> None:
        self._start().submit(os.getpid)

    def _start(self) -> ProcessPoolExecutor:
        if self._executor is None:
            context = multiprocessing.get_context("fork" if _may_fork() else "spawn")
            self._progress = context.Queue()
            self._executor = ProcessPoolExecutor(
                self._workers, context, initializer=_start_worker, initargs=(self._progress,)
            )
        return self._executor

    def _report(self, advance: Advance) -> None:
        while True:
            try:
                advance(self._progress.get_nowait())
            except queue.Empty:
                return

    def close(self) -> None:
        """Kills the workers after an error in one of their tasks.

        Waiting for the others could delay the error by an hour, and even idle processes take a
        quarter of a second to exit normally.
        """
        if self._executor is not None:
            for process in list(self._executor._processes.values()):
                process.terminate()
            self._executor.shutdown(wait=True, cancel_futures=True)


# ---------------------------------------------------------------- worker processes

_THREADED = {"torch", "datasets", "fsspec", "pyarrow", "ray"}  # may have threads that hold locks


def _may_fork() -> bool:
    """Whether fork is safe: a forked worker inherits modules and tokenizer, which saves a
    second."""
    loaded = _THREADED & sys.modules.keys()
    return sys.platform == "linux" and threading.active_count() == 1 and not loaded


_progress: Any = None


def _start_worker(progress: Any) -> None:
    """Initializes a worker: where to report progress, and exit when the parent dies."""
    global _progress
    _progress = progress
    progress.cancel_join_thread()  # the exit must not wait until the last numbers are read
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _in_worker(work: Work[T, R], task: T) -> R:
    return work(task, _progress.put)
