"""Which checkpoints a run keeps, how many are on disk at once, and how many bytes they take.

The single definition of all three: saving deletes checkpoints by the same rule
(`layout.superseded`), and `leviathan check` and the trainer compare the same numbers with the free
space.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leviathan.checkpoint.layout import complete_checkpoints, step_of, superseded
from leviathan.config.schema import CheckpointConfig, RunConfig
from leviathan.data.dataset import tokenizer_bytes
from leviathan.model.model_stats import count_params
from leviathan.model.transformer import meta_model

STATES = 3  # tensors per parameter: the fp32 weight and AdamW's two moments
BYTES = 4  # per fp32 value
# Overhead of DCP per stored chunk (archive of torch.save, metadata entry).
PIECE_BYTES = 1_577 + 275
RANGE_PIECES = 6  # additional chunks at the two ends of a flat range
FILE_BYTES = 150  # manifest entry per file
SMALL_FILES = 4_000  # bytes of configuration, state, manifest and metadata


@dataclass(frozen=True)
class Retention:
    """What a run saves and keeps.

    Attributes:
        bytes_each: bytes of one checkpoint.
        saves: number of scheduled saves, from step 0 to the last step.
        kept: steps whose checkpoints remain when the run is complete.
        at_once: maximum number of complete checkpoints on disk, including the latest one before
            older ones are deleted.
        more: maximum number of additional checkpoints on disk if the run resumes now.
    """

    bytes_each: int
    saves: int
    kept: tuple[int, ...]
    at_once: int
    more: int

    @property
    def bytes_needed(self) -> int:
        """Free bytes that the remaining steps need."""
        return self.more * self.bytes_each


def retention(config: RunConfig, world_size: int = 1) -> Retention:
    """What a run saves and keeps, in total and beyond the checkpoints that it has."""
    saves = scheduled_saves(config)
    kept, at_once = _simulate([], saves, config.checkpoint)
    there = [step_of(path) for path in complete_checkpoints(config.run_dir)]
    later = [step for step in saves if not there or step > there[-1]]
    _, most = _simulate(there, later, config.checkpoint)
    size = checkpoint_bytes(config, world_size)
    return Retention(size, len(saves), tuple(kept), at_once, most - len(there))


def scheduled_saves(config: RunConfig) -> list[int]:
    """The steps after which a run saves, including the last step."""
    every, steps = config.checkpoint.every, config.train.steps
    saves = list(range(every, steps + 1, every)) if every else []
    return saves if saves and saves[-1] == steps else [*saves, steps]


def _simulate(
    there: Sequence[int], saves: Sequence[int], keep: CheckpointConfig
) -> tuple[list[int], int]:
    """The steps on disk after all saves, and the maximum number of steps on disk."""
    marked: list[int] = []  # kept permanently, and older than the last `keep_last`
    recent, most = list(there), len(there)
    for step in saves:
        recent.append(step)
        most = max(most, len(marked) + len(recent))
        gone = set(superseded(recent, keep))
        marked += [old for old in recent[: -keep.keep_last] if old not in gone]
        recent = recent[-keep.keep_last :]
    return marked + recent, most


def checkpoint_bytes(config: RunConfig, world_size: int = 1) -> int:
    """Bytes of one checkpoint: tensors, DCP's overhead per chunk, tokenizer and small files."""
    tensors = sum(1 for _ in meta_model(config.model).parameters())
    engine = config.engine
    if engine.kind == "fsdp2":  # every rank of a replica holds a part of every tensor
        pieces = tensors * max(1, world_size // engine.dp_replicate)
    elif engine.zero_stage == 3:
        pieces = tensors * world_size
    else:  # every rank has a flat range that starts and ends inside a tensor
        pieces = tensors * config.parallel.tp + RANGE_PIECES * (world_size - 1)
    return (
        STATES * (BYTES * count_params(config.model).total + pieces * PIECE_BYTES)
        + tokenizer_bytes(config.data)
        + world_size * FILE_BYTES
        + SMALL_FILES
    )
