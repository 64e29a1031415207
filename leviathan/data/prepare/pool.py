"""What runs independent tasks; and two that do, here and in processes of this machine.

A task is small and says where its result belongs on a (shared) disk; doing it again after a crash
gives the same bytes. So no more is asked of a pool than that every task is done once or oftener.
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

Advance = Callable[[float], Any]  # told how much more is done, in the unit of the work
Work = Callable[[T, Advance], R]


class Pool(Protocol):
    """Where tasks are done."""

    def start(self) -> None:
        """Starts what `run` needs, if it can be of use to do so early: before bars are drawn."""
        ...

    def run(
        self,
        work: Work[T, R],
        tasks: Mapping[int, T],
        advance: Advance,
        finish: Callable[[int, R], Any],
    ) -> None:
        """Does `work(task, advance)` for every task, in any order, a few at a time.

        `finish(number, result)` is called here, as results come in; an error of a task ends all.

        Raises:
            DataError: a task's own, or a worker died.
        """
        ...


@contextmanager
def open_local_pool(workers: int) -> Iterator[Pool]:
    """This process, or `workers` others that end at the end."""
    if workers == 1:
        yield _SerialPool()
    else:
        processes = _ProcessPool(workers)
        try:
            yield processes
        finally:
            processes.close()


class _SerialPool:
    """One task after the other, in this process."""

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
    """Worker processes that are started at the first task and kept until the end."""

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
                # Not all at once: a task in the queue is pickled, a result held.
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
                "a worker process died (out of memory?): run the same command again, with fewer "
                "workers if it happens again",
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
        """Ends the workers, after an error in the middle of their tasks.

        No one wants to wait an hour for the others before an error is shown, nor a quarter of a
        second for idle processes to tidy up.
        """
        if self._executor is not None:
            for process in list(self._executor._processes.values()):
                process.terminate()
            self._executor.shutdown(wait=True, cancel_futures=True)


# ---------------------------------------------------------------- worker processes

_THREADED = {"torch", "datasets", "fsspec", "pyarrow", "ray"}  # may have threads, and hold locks


def _may_fork() -> bool:
    """Whether a fork is safe: it has the modules and the tokenizer at once, a second's work."""
    loaded = _THREADED & sys.modules.keys()
    return sys.platform == "linux" and threading.active_count() == 1 and not loaded


_progress: Any = None


def _start_worker(progress: Any) -> None:
    """Where to report to; and to end when the parent is gone."""
    global _progress
    _progress = progress
    progress.cancel_join_thread()  # ending must not wait for someone to read the last numbers
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _in_worker(work: Work[T, R], task: T) -> R:
    return work(task, _progress.put)
