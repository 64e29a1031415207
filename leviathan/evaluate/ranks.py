"""The ranks of an evaluation: each has the full model and scores its share of the batches."""

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
    """The processes that a launcher started, or only this one.

    The batches do not depend on the number of ranks, so results are bitwise identical.
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
        """Runs `work` on rank 0; returns its result, or raises its error, on all ranks."""
        if self._mesh is None:
            return work()
        found: T | None = None
        with self._mesh.sync_errors():
            if self.rank == 0:
                found = work()
        return self._mesh.broadcast(found)  # pyright: ignore[reportReturnType]

    def on_each_rank(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank; an error on one rank is raised on all."""
        if self._mesh is None:
            return work()
        found: list[T] = []
        with self._mesh.sync_errors():
            found.append(work())
        return found[0]

    def map(self, work: Callable[[A], T], items: Sequence[A]) -> list[T]:
        """Distributes `work` over the ranks; returns all results in order on every rank.

        `work` must not communicate.
        """
        mine = items[self.rank :: self.world_size]
        done = self.on_each_rank(lambda: [work(item) for item in mine])
        if self._mesh is None:
            return done
        shares = self._mesh.gather(done)
        return [shares[n % self.world_size][n // self.world_size] for n in range(len(items))]

    def stream(self, work: Callable[[A], T], items: Iterable[A]) -> Iterator[tuple[A, T]]:
        """Like `map`, yields (item, result); keeps at most one item per rank in memory."""
        source = iter(items)
        while group := self.on_each_rank(lambda: list(islice(source, self.world_size))):
            yield from zip(group, self.map(work, group), strict=True)


def join_ranks() -> Ranks:
    """Returns the ranks of this launch, or only this process without a launcher.

    Raises:
        ConfigError: the other ranks cannot be reached.
        LocalRankError: the launcher's environment variables are invalid.
    """
    if all(os.environ.get(name, "1") == "1" for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        return Ranks()  # some systems set RANK everywhere
    env = read_launch_env()
    limit_threads(env)
    return Ranks(init_mesh(env, tp=1))
