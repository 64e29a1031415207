"""The process mesh of a run, and collectives on small CPU values."""

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
    """Process mesh: world = dp × tp, tp innermost. Its collectives are for small CPU values."""

    rank: int
    world_size: int
    tp: int
    device: torch.device
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    group: dist.ProcessGroup | None = None  # used by the collectives; None: the default group
    checkpoint_process_group: dist.ProcessGroup | None = None

    @property
    def checkpoint_group(self) -> "Mesh":
        """The same ranks with a separate process group, for one background thread."""
        return replace(self, group=self.checkpoint_process_group)

    @property
    def dp(self) -> int:
        """The data-parallel size."""
        return self.world_size // self.tp

    @property
    def dp_rank(self) -> int:
        """This rank's index on the data-parallel axis; equal for all ranks of a tp group."""
        return self.rank // self.tp

    def sum(self, *values: float) -> list[float]:
        """Sums each value over all ranks, in float64."""
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals, group=self.group)
        return totals.tolist()

    def any(self, flag: bool) -> bool:
        """True on every rank if it is true on at least one."""
        return self.sum(float(flag))[0] > 0

    def broadcast(self, value: T) -> T:
        """Returns rank 0's `value` on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """What fails in the body on one rank fails on all, so that no one waits forever.

        The body must not communicate. The error of the lowest failing rank is raised on every rank.
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
    """Initializes the process group, once per process, and selects this rank's device.

    A collective that takes longer than `timeout_s` fails.

    Raises:
        ConfigError: tp does not divide the world size, or the other ranks are unreachable.
    """
    if env.world_size % tp:
        raise ConfigError(
            "parallel.indivisible",
            f"parallel.tp={tp} does not divide the number of ranks, {env.world_size}. Start a "
            "multiple of parallel.tp ranks, or set parallel.tp to a divisor",
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    if cuda and env.local_rank >= (count := torch.cuda.device_count()):
        raise LocalRankError(
            "launch_env.too_few_gpus",
            f"local rank {env.local_rank} sees {count} GPUs. Start at most one rank per GPU, and "
            "make all GPUs of a node visible to each of its ranks",
        )
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        try:
            # Gloo is used for the small CPU values of this class, also when gradients use NCCL.
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        except (RuntimeError, ValueError, OSError) as error:
            at = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise ConfigError(
                "parallel.unreachable",
                f"rank {env.rank} of {env.world_size} cannot reach the other ranks at {at} "
                f"(MASTER_ADDR:MASTER_PORT): {error}. Check that all ranks are running and that "
                "this address is reachable",
            ) from error
        # Only at exit: DeepSpeed keeps a reference to the group, and a second run needs it.
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
    """Destroys the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
