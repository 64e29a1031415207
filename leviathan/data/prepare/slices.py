"""The slice of the corpus that this process tokenizes, if several processes share a corpus."""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from leviathan.errors import ConfigError


@dataclass(frozen=True)
class PrepSlice:
    """Every `world`-th input file, from number `rank` on."""

    rank: int
    world: int


def read_slice(environment: MutableMapping[str, str] = os.environ) -> PrepSlice:
    """Reads the slice from the launcher's variables: RANK and WORLD_SIZE, or a Slurm array's.

    RANK and WORLD_SIZE are removed from the environment: slices are not ranks of one run, and each
    prints its own output.

    Raises:
        ConfigError: the variables are missing or inconsistent.
    """
    if "RANK" in environment:
        rank = _number(environment, "RANK")
        world = _number(environment, "WORLD_SIZE")
        names = "RANK, WORLD_SIZE"
        del environment["RANK"], environment["WORLD_SIZE"]
    elif "SLURM_ARRAY_TASK_ID" in environment:
        first = _number(environment, "SLURM_ARRAY_TASK_MIN")
        rank = _number(environment, "SLURM_ARRAY_TASK_ID") - first
        world = _number(environment, "SLURM_ARRAY_TASK_COUNT")
        names = "SLURM_ARRAY_TASK_ID, _MIN, _COUNT"
        if "SLURM_ARRAY_TASK_MAX" in environment:
            last = _number(environment, "SLURM_ARRAY_TASK_MAX")
            if last - first + 1 != world:
                raise ConfigError(
                    "slices.invalid_array",
                    f"executor=rank: the array's tasks {first} to {last} are not {world} "
                    "consecutive numbers. Submit it with --array=0-N, without steps or gaps",
                )
    else:
        raise ConfigError(
            "slices.no_rank",
            "executor=rank: neither RANK and WORLD_SIZE nor SLURM_ARRAY_TASK_ID is set. Set "
            "them, start an array job, or use executor=local",
        )
    if not 0 <= rank < world:
        raise ConfigError(
            "slices.invalid_rank",
            f"executor=rank: slice {rank} of {world} does not exist ({names})",
        )
    return PrepSlice(rank, world)


def _number(environment: MutableMapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise ConfigError("slices.no_rank", f"executor=rank: {name} is not set") from None
    except ValueError:
        found = environment[name]
        raise ConfigError(
            "slices.invalid_rank", f"executor=rank: {name}={found!r} is not a number"
        ) from None
