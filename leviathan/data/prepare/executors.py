"""Executors of independent tasks: serial, a process pool, and a Ray cluster.

A task is small and states where its result belongs on a (shared) disk; running it again after a
crash gives the same bytes. An executor must therefore only run every task at least once. This is
the only module that imports Ray.
"""

import logging
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

from leviathan.errors import ConfigError, DataError, LeviathanError

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
    """Whether fork is safe, which saves the import of modules and the tokenizer."""
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


@contextmanager
def open_ray_pool() -> Iterator["_RayPool"]:
    """Connects to the cluster at $RAY_ADDRESS, or to the one of this node.

    This package must be installed on its nodes, which must see the corpus and `out` under the same
    paths.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports] - an extra
    except ImportError:
        raise ConfigError(
            "ray.not_installed",
            "executor=ray needs Ray: pip install 'leviathan[ray]', or use executor=local",
        ) from None
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            "ray.unreachable",
            f"executor=ray: no Ray cluster at {address} ({error}): start one with `ray start "
            "--head`, set RAY_ADDRESS, or use executor=local",
        ) from None
    try:
        yield _RayPool(ray)
    finally:
        ray.shutdown()


class _RayPool:
    """A `Pool` whose tasks take one core each on any node."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def start(self) -> None:
        """Does nothing: the cluster is already running."""

    def run(
        self,
        work: Work[T, R],
        tasks: Mapping[int, T],
        advance: Advance,
        finish: Callable[[int, R], Any],
    ) -> None:
        ray = self._ray
        remote = ray.remote(_remotely)
        at_once = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        todo = iter(tasks.items())
        running: dict[Any, int] = {}
        try:
            while True:
                while len(running) < at_once and (item := next(todo, None)):
                    running[remote.remote(work, item[1])] = item[0]
                if not running:
                    return
                ready, _ = ray.wait(list(running))
                for reference in ready:
                    result, amount = self._result(reference)
                    advance(amount)
                    finish(running.pop(reference), result)
        except BaseException:
            for reference in running:
                ray.cancel(reference, force=True)
            raise

    def _result(self, reference: Any) -> Any:
        """Result of a task; raises the error that the task raised. Dead workers are retried."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, LeviathanError | OSError):
                raise error.cause from None
            raise
        except errors.RayError as error:
            raise DataError(
                "ray.task_lost",
                f"a task was lost by the Ray cluster ({type(error).__name__}). Run the same "
                "command to resume",
            ) from error


def _remotely(work: Work[T, R], task: T) -> tuple[R, float]:
    """Runs a task; returns its result and its total progress."""
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done
        done += amount

    return work(task, advance), done
