"""Parallel work on a range, split into one large slice per core.

The operations of a block are small. Parallelized individually, they would synchronize thousands of
times per step; each slice synchronizes once.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")

MAX_WORKERS = 8  # with more workers, Python's GIL would dominate; each then uses several cores
MIN_ITEMS_PER_WORKER = 32  # minimum number of items per worker


def in_parallel(work: Callable[[slice], Result], count: int) -> list[Result]:
    """Runs `work` on consecutive slices of `range(count)`, without gradient; returns ordered
    results.

    The slices depend only on the count and on `torch.get_num_threads()`. No thread outlives the
    call.
    """
    threads = torch.get_num_threads()
    workers = max(1, min(threads, MAX_WORKERS, count // MIN_ITEMS_PER_WORKER))
    bounds = [count * number // workers for number in range(workers + 1)]
    slices = [slice(*pair) for pair in itertools.pairwise(bounds)]
    if workers == 1:
        return [_without_gradient(work, slices[0])]

    def start() -> None:
        torch.set_num_threads(threads // workers)

    with ThreadPoolExecutor(workers - 1, "leviathan", start) as pool:
        futures = [pool.submit(_without_gradient, work, part) for part in slices[1:]]
        try:
            torch.set_num_threads(threads // workers)
            first = _without_gradient(work, slices[0])
            return [first, *(future.result() for future in futures)]
        finally:
            # The setting is per thread, but also the default of threads that start later.
            torch.set_num_threads(threads)


@torch.no_grad()
def _without_gradient(work: Callable[[slice], Result], part: slice) -> Result:
    return work(part)
