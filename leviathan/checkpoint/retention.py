"""Which checkpoints a run keeps, how many lie on the disk at once, and how many bytes they take.

The only definition of all three: saving removes by the same rule (`layout.superseded`), and
`leviathan check` and the trainer hold the same figures against the free space.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from leviathan.checkpoint.layout import complete_checkpoints, step_of, superseded
from leviathan.config.schema import CheckpointConfig, RunConfig
from leviathan.data.dataset import tokenizer_bytes
from leviathan.model.accounting import account
from leviathan.model.transformer import CausalLM

STATES = 3  # of every parameter: the fp32 weight and AdamW's two moments
BYTES = 4
# What DCP adds to a stored piece of a tensor (torch.save's archive, an entry of the metadata).
PIECE_BYTES = 1_577 + 275
RANGE_PIECES = 6  # rectangles beyond one that a flat range has, at its two ends
FILE_BYTES = 150  # an entry of the manifest
SMALL_FILES = 4_000  # configuration, state, the manifest's and the metadata's own


@dataclass(frozen=True)
class Retention:
    """What a run saves and keeps.

    Attributes:
        bytes_each: of one checkpoint.
        saves: how often the whole run saves, without signals.
        kept: steps whose checkpoints stay when the run is complete.
        at_once: most complete checkpoints on the disk at one moment: the one just saved and those
            that it has not yet replaced.
        more: how many more than lie there already, of the run as it goes on from these.
    """

    bytes_each: int
    saves: int
    kept: tuple[int, ...]
    at_once: int
    more: int

    @property
    def bytes_needed(self) -> int:
        """Free bytes that the rest of the run needs."""
        return self.more * self.bytes_each


def retention(config: RunConfig, world_size: int = 1) -> Retention:
    """What the run saves and keeps, from the start and from the checkpoints that it has."""
    saves = scheduled_saves(config)
    kept, at_once = _simulate([], saves, config.checkpoint)
    there = [step_of(path) for path in complete_checkpoints(config.run_dir)]
    later = [step for step in saves if not there or step > there[-1]]
    _, most = _simulate(there, later, config.checkpoint)
    size = checkpoint_bytes(config, world_size)
    return Retention(size, len(saves), tuple(kept), at_once, most - len(there))


def scheduled_saves(config: RunConfig) -> list[int]:
    """The steps after which a run saves, the last step included."""
    every, steps = config.checkpoint.every, config.train.steps
    saves = list(range(every, steps + 1, every)) if every else []
    return saves if saves and saves[-1] == steps else [*saves, steps]


def _simulate(
    there: Sequence[int], saves: Sequence[int], keep: CheckpointConfig
) -> tuple[list[int], int]:
    """The steps that are there after all saves, and how many there were at most."""
    marked: list[int] = []  # kept for good, and too old to be looked at again
    recent, most = list(there), len(there)
    for step in saves:
        recent.append(step)
        most = max(most, len(marked) + len(recent))
        gone = set(superseded(recent, keep))
        marked += [old for old in recent[: -keep.keep_last] if old not in gone]
        recent = recent[-keep.keep_last :]
    return marked + recent, most


def checkpoint_bytes(config: RunConfig, world_size: int = 1) -> int:
    """Bytes of one checkpoint: tensors, what DCP adds to their pieces, tokenizer, small files."""
    with torch.device("meta"):
        tensors = sum(1 for _ in CausalLM(config.model).parameters())
    engine = config.engine
    if engine.kind == "fsdp2":  # every rank of one copy holds a part of every tensor
        pieces = tensors * max(1, world_size // engine.replicas)
    elif engine.zero_stage == 3:
        pieces = tensors * world_size
    else:  # a flat range each, which begins and ends inside a tensor
        pieces = tensors * config.parallel.tp + RANGE_PIECES * (world_size - 1)
    return (
        STATES * (BYTES * account(config.model).total + pieces * PIECE_BYTES)
        + tokenizer_bytes(config.data)
        + world_size * FILE_BYTES
        + SMALL_FILES
    )
