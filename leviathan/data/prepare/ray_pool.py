"""Runs tasks on an existing Ray cluster. The only module that imports Ray."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from leviathan.data.prepare.pool import Advance, R, T, Work
from leviathan.errors import ConfigError, DataError, LeviathanError


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
