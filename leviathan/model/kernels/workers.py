"""Work on a range, shared among the processor's cores in few large pieces.

A block's operations are small. Split over the cores one by one they would meet at thousands of
barriers a step, each as late as the latest core; a range a worker meets once.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")

MAX_WORKERS = 8  # beyond, Python's lock would be in the way; each then uses several cores
MIN_ITEMS_PER_WORKER = 32  # for one worker


def in_parallel(work: Callable[[slice], Result], count: int) -> list[Result]:
    """`work` on consecutive slices of `range(count)`, without gradient; results in their order.

    How the range is cut depends on the count and on `torch.get_num_threads()` alone. Nothing
    outlives the call.
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
            # The setting is a thread's own, but is also what threads made later begin with.
            torch.set_num_threads(threads)


@torch.no_grad()
def _without_gradient(work: Callable[[slice], Result], part: slice) -> Result:
    return work(part)
