"""The ranks of an evaluation: each holds the whole model and scores its share of the batches."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch

from leviathan.parallel.launch_env import limit_threads, read_launch_env
from leviathan.parallel.mesh import Mesh, init_mesh

A = TypeVar("A")
T = TypeVar("T")


class Ranks:
    """The processes that a launcher started, or this one alone.

    What one rank alone would compute, batch by batch, several share: batches are the same, and so
    is every result, to the bit.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self.rank = 0 if mesh is None else mesh.rank
        self.world_size = 1 if mesh is None else mesh.world_size
        cuda = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device = cuda if mesh is None else mesh.device

    @property
    def all(self) -> range:
        """The numbers of all ranks."""
        return range(self.world_size)

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """What rank 0 finds, on all of them; so is its error."""
        if self._mesh is None:
            return work()
        found: T | None = None
        with self._mesh.sync_errors():
            if self.rank == 0:
                found = work()
        return self._mesh.broadcast(found)  # pyright: ignore[reportReturnType]

    def on_each_rank(self, work: Callable[[], T]) -> T:
        """The same work on every rank; what fails on one fails on all."""
        if self._mesh is None:
            return work()
        found: list[T] = []
        with self._mesh.sync_errors():
            found.append(work())
        return found[0]

    def map(self, work: Callable[[A], T], items: Sequence[A]) -> list[T]:
        """`work` of each item, done on some rank; all results on every rank, in order.

        `work` must not communicate.
        """
        mine = items[self.rank :: self.world_size]
        done = self.on_each_rank(lambda: [work(item) for item in mine])
        if self._mesh is None:
            return done
        shares = self._mesh.gather(done)
        return [shares[n % self.world_size][n // self.world_size] for n in range(len(items))]

    def stream(self, work: Callable[[A], T], items: Iterable[A]) -> Iterator[tuple[A, T]]:
        """As `map`, with the items, and without holding more than one of them a rank at a time."""
        source = iter(items)
        while group := self.on_each_rank(lambda: list(islice(source, self.world_size))):
            yield from zip(group, self.map(work, group), strict=True)


def join_ranks() -> Ranks:
    """The ranks of this launch; this process alone if no launcher started several.

    Raises:
        ConfigError: the others cannot be reached.
        LocalRankError: the launcher's variables make no sense.
    """
    if all(os.environ.get(name, "1") == "1" for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        return Ranks()  # some systems set RANK everywhere
    env = read_launch_env()
    limit_threads(env)
    return Ranks(init_mesh(env, tp=1))
