"""Tokenises corpus files, in this process or in a pool, continuing what was begun."""

import multiprocessing
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from leviathan.config.schema import PrepConfig
from leviathan.console import Bar, progress_bar, say
from leviathan.data.prepare.ledger import Ledger
from leviathan.data.prepare.tokenise import (
    PartInfo,
    Task,
    start_worker,
    tokenise,
    tokenise_in_worker,
)
from leviathan.errors import DataError

# max_reject_fraction counts from here on: of five lines, one bad one says nothing yet.
FEW_REJECTS = 100


def tokenise_all(tasks: list[Task], ledger: Ledger, config: PrepConfig) -> list[PartInfo]:
    """Makes the part of every task that has none yet, on `config.workers` processes.

    Returns:
        One description a task, in order.

    Raises:
        DataError: a file is damaged, a line is bad and `on_error` is fail, or too many are bad.
    """
    done = {index: info for index, task in enumerate(tasks) if (info := ledger.finished(task))}
    if done:
        say(f"continuing: {len(done)} of {len(tasks)} files were already tokenised")
    pending = {index: task for index, task in enumerate(tasks) if index not in done}
    total = sum(task.source.size() or 0 for task in tasks) or None
    start = sum(tasks[index].source.size() or 0 for index in done)
    with progress_bar("tokenising (bytes)", total=total, start=start) as bar:

        def finish(index: int, info: PartInfo) -> None:
            done[index] = info
            bar.advance(0, note=f"{len(done)}/{len(tasks)} files")
            _check_rejects(list(done.values()), config.max_reject_fraction)

        if min(config.workers, len(pending)) > 1:
            _tokenise_in_processes(pending, config.workers, bar, finish)
        else:
            for index, task in pending.items():
                finish(index, tokenise(task, bar.advance))
    return [done[index] for index in range(len(tasks))]


def _tokenise_in_processes(
    pending: dict[int, Task], workers: int, bar: Bar, finish: Callable[[int, PartInfo], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    progress = context.Queue()
    pool = ProcessPoolExecutor(
        min(workers, len(pending)), context, initializer=start_worker, initargs=(progress,)
    )
    futures = {pool.submit(tokenise_in_worker, task): index for index, task in pending.items()}
    waiting = set(futures)
    try:
        while waiting:
            ready, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
            while True:
                try:
                    bar.advance(progress.get_nowait())
                except queue.Empty:
                    break
            for future in ready:
                finish(futures[future], future.result())
    except BrokenProcessPool:
        raise DataError(
            "a tokenising process died (out of memory?): run the same command again, with fewer "
            "workers if it happens again"
        ) from None
    except BaseException:
        # Do not let the others read on for an hour before the error is shown.
        for process in list(pool._processes.values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_rejects(infos: Sequence[PartInfo], limit: float) -> None:
    rejected = sum(info.rejected for info in infos)
    lines = rejected + sum(info.documents + info.empty for info in infos)
    if rejected > FEW_REJECTS and rejected > limit * lines:
        raise DataError(
            f"{rejected:,} of {lines:,} lines are bad, more than max_reject_fraction={limit}; "
            f"for example in {next(info.path for info in infos if info.rejected)}"
        )
