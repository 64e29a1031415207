"""What a training engine is: cut at a whole optimizer step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from leviathan.data.stream import Batch
from leviathan.model.transformer import TokenScores


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step was, the same on every rank."""

    loss: float  # nats per valid target token, over the global batch
    grad_norm: float  # global L2 norm before clipping
    tokens: int  # valid target tokens of the global batch
    skipped: bool  # True: loss or gradients were not finite; weights and moments are as before


@dataclass(frozen=True)
class ParamState:
    """One whole parameter and its moments, fp32, on the CPU."""

    name: str
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class SaveHandle:
    """A save that may still be going on; `wait` returns when it is on the disk."""

    def wait(self) -> None:
        """Returns when everything is written; raises what the writing raised."""


class Engine(Protocol):
    """Every method is collective: all ranks call it together, with the same step in mind."""

    optimizer_steps: int
    """AdamW updates applied so far: finished steps less the skipped ones."""

    def train_step(self, microbatches: Sequence[Batch], lr: float) -> StepStats:
        """Forward, backward and one AdamW update with learning rate `lr`."""
        ...

    def score(self, batch: Batch) -> TokenScores:
        """Per-token negative log-likelihoods of this rank's rows [B, T]; no gradient."""
        ...

    def save(self, directory: Path) -> SaveHandle:
        """Writes weights and moments into an existing folder."""
        ...

    def load(self, directory: Path) -> None:
        """Reads weights and moments that any layout wrote."""
        ...

    def iter_full_state(self) -> Iterator[ParamState]:
        """Whole parameters with their moments, one at a time, by canonical name."""
        ...
