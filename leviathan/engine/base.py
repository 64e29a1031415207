"""What a training engine is: cut at a whole optimizer step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from leviathan.checkpoint.save_future import SaveFuture
from leviathan.data.loader import Batch
from leviathan.model.transformer import TokenScores
from leviathan.optim import GuardedAdamW
from leviathan.parallel.mesh import Mesh
from leviathan.parallel.tensor_parallel import NamedTensors, TPLayout


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step was, the same on every rank."""

    loss: float  # nats per valid target token, over the global batch
    grad_norm: float  # global L2 norm before clipping
    tokens: int  # valid target tokens of the global batch
    skipped: bool  # True: loss or gradients were not finite; weights and moments are as before
    clip_norms: tuple[float, ...] = ()  # argument of `GuardedAdamW.clip`; grad_norm² = Σ norm²


@dataclass(frozen=True)
class ParamState:
    """One whole parameter and its moments, fp32, on the CPU."""

    name: str
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


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

    def save(self, directory: Path) -> SaveFuture:
        """Writes weights and moments into an existing folder; perhaps in the background.

        What happens to them afterwards is not in it.
        """
        ...

    def load(self, directory: Path) -> None:
        """Reads weights and moments that any layout wrote."""
        ...

    def iter_full_state(self) -> Iterator[ParamState]:
        """Whole parameters with their moments, one at a time, by canonical name."""
        ...


def global_targets(microbatches: Sequence[Batch], mesh: Mesh) -> int:
    """Valid target tokens of a step over all data-parallel ranks. Collective."""
    return int(mesh.sum(sum(batch.n_targets for batch in microbatches))[0]) // mesh.tp


def step_stats(nll: Tensor, squares: Tensor, tokens: int, mesh: Mesh) -> StepStats:
    """What a step was, before its update is made or omitted. Collective.

    The squared norms are at once the finite check: no other reduction is needed for it. All values
    are read at once, the only time in a step that the device is waited for: whether there is an
    update at all hangs on them, in DeepSpeed on the CPU.

    Args:
        nll: this rank's sum over targets, float64.
        squares: this rank's part of the squared gradient norms by clip index, float64 `[n]`.
        tokens: valid targets of the global batch.
        mesh: the ranks.
    """
    local = torch.cat([(nll / mesh.tp).view(1), squares.to(nll.device)])
    nll_sum, *sums = mesh.sum(*local.tolist())
    finite = all(map(math.isfinite, (nll_sum, *sums)))
    norms = tuple(math.sqrt(total) if math.isfinite(total) else math.inf for total in sums)
    return StepStats(nll_sum / max(1, tokens), math.hypot(*norms), tokens, not finite, norms)


def squared_norms(
    gradients: NamedTensors, layout: TPLayout, adamw: GuardedAdamW, device: torch.device
) -> Tensor:
    """Σ g² by clip index `[n]`, in fp32 within a tensor and in fp64 over tensors.

    Not finite if a gradient is not finite. Summed over tensor-parallel ranks, each element of the
    full parameters counts once. The result is left on the device.
    """
    count = adamw.clip_count
    if not gradients:
        return torch.zeros(count, dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for _, g in gradients]
    places = [(adamw.clip_index[name], layout.weight(name)) for name, _ in gradients]
    weights = tuple(
        tuple(weight if place == index else 0.0 for place, weight in places)
        for index in range(count)
    )
    squares = torch.stack(norms).double().square()
    return _on_device(weights, gradients[0][1].device) @ squares


@cache
def _on_device(values: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """The same in every step: copied there once, as a copy waits for the device."""
    return torch.tensor(values, dtype=torch.float64, device=device)
