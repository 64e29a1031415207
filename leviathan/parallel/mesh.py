"""The ranks of a run, how they are arranged, and the few things they say to one another."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from leviathan.errors import ConfigError, LeviathanError, LocalRankError
from leviathan.parallel.launch_env import LaunchEnv

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """World = dp × tp, tp innermost. All collectives here are on small CPU values."""

    rank: int
    world_size: int
    tp: int
    device: torch.device
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    group: dist.ProcessGroup | None = None  # that the collectives here use; None: the default one
    checkpoint_process_group: dist.ProcessGroup | None = None

    @property
    def checkpoint_group(self) -> "Mesh":
        """The same ranks over a group of their own, for one thread beside the training."""
        return replace(self, group=self.checkpoint_process_group)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.tp

    @property
    def dp_rank(self) -> int:
        """This rank's place along the data-parallel axis; its tp peers share it."""
        return self.rank // self.tp

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks, in float64."""
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals, group=self.group)
        return totals.tolist()

    def any(self, flag: bool) -> bool:
        """True on every rank as soon as it is true on one."""
        return self.sum(float(flag))[0] > 0

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's `value` in the order of ranks, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """What fails in the body on one rank fails on all, so that no one waits forever.

        The body must not communicate. The first rank's error is raised everywhere.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if not self.any(error is not None):
            return
        known = error if isinstance(error, LeviathanError) else None
        errors = self.gather(None if error is None else (known, str(error)))
        first, text = next(entry for entry in errors if entry is not None)
        if error is not None and (first is None or str(error) == text):
            raise error
        raise first or RuntimeError(text)


def init_mesh(env: LaunchEnv, tp: int, timeout_s: float = 1800) -> Mesh:
    """Joins the process group, once in a process's life, and picks this rank's device.

    A collective that takes longer than `timeout_s` fails.

    Raises:
        ConfigError: tp does not divide the world, or the other ranks cannot be reached.
    """
    if env.world_size % tp:
        raise ConfigError(
            "parallel.indivisible",
            f"parallel.tp={tp} does not divide the world of {env.world_size} ranks: start a "
            "multiple of it, or set a parallel.tp that divides them",
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    if cuda and env.local_rank >= (count := torch.cuda.device_count()):
        raise LocalRankError(
            "launch_env.too_few_gpus",
            f"local rank {env.local_rank} sees {count} GPUs: start at most one rank a GPU, and let "
            "every rank of a machine see all of its GPUs",
        )
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        try:
            # Gloo serves the small CPU values of this class also where gradients go through NCCL.
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        except (RuntimeError, ValueError, OSError) as error:
            at = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise ConfigError(
                "parallel.unreachable",
                f"rank {env.rank} of {env.world_size} cannot reach the others at {at} "
                f"(MASTER_ADDR:MASTER_PORT): {error}",
            ) from error
        # Not sooner: DeepSpeed holds on to the group, and a second run in this process needs it.
        atexit.register(leave_mesh)
    checkpoint_process_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(checkpoint_process_group, dist.ProcessGroup)
    axes = init_device_mesh(device.type, (env.world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    groups = axes.get_group("dp"), axes.get_group("tp")
    return Mesh(
        env.rank,
        env.world_size,
        tp,
        device,
        *groups,
        checkpoint_process_group=checkpoint_process_group,
    )


def leave_mesh() -> None:
    """Leaves the process group; harmless where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
