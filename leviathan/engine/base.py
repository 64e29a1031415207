"""The `Engine` protocol: one method call per optimizer step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leviathan.checkpoint.store import SaveFuture
from leviathan.config.run import EngineConfig
from leviathan.data.loader import Batch
from leviathan.model.head import TokenScores
from leviathan.model.transformer import CausalLM
from leviathan.optim import GuardedAdamW
from leviathan.parallel.mesh import Mesh
from leviathan.parallel.tensor_parallel import NamedTensors, TPLayout


def prepare_blocks(model: CausalLM, engine: EngineConfig) -> None:
    """Applies `torch.compile` and activation checkpointing to the blocks, as configured.

    Only `forward` is replaced: parameter names are unchanged, and the hooks that an engine
    registers on a block (gathering its weights) run outside both.
    """
    for block in model.model.layers:
        if engine.compile:
            block.forward = torch.compile(block.forward)
        if engine.activation_checkpointing:
            # Blocks use no random numbers.
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )


@dataclass(frozen=True)
class StepStats:
    """Statistics of one optimizer step, identical on every rank."""

    loss: float  # nats per valid target token, over the global batch
    grad_norm: float  # global L2 norm before clipping
    tokens: int  # valid target tokens of the global batch
    skipped: bool  # loss or gradients were not finite; weights and moments are unchanged
    clip_norms: tuple[float, ...] = ()  # argument of `GuardedAdamW.clip`; grad_norm² = Σ norm²


@dataclass(frozen=True)
class ParamState:
    """One full parameter and its moments, fp32, on the CPU."""

    name: str
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Engine(Protocol):
    """Training engine. Every method is collective: all ranks call it for the same step."""

    optimizer_steps: int
    """AdamW updates applied so far: finished steps minus skipped steps."""

    def train_step(self, microbatches: Sequence[Batch], lr: float) -> StepStats:
        """Forward, backward and one AdamW update with learning rate `lr`."""
        ...

    def score(self, batch: Batch) -> TokenScores:
        """Per-token negative log-likelihoods `[B, T]` of this rank's samples, without gradient."""
        ...

    def save(self, directory: Path) -> SaveFuture:
        """Writes weights and moments into an existing directory, possibly asynchronously.

        Later updates do not affect what is written.
        """
        ...

    def load(self, directory: Path) -> None:
        """Loads weights and moments written by any parallel layout."""
        ...

    def iter_full_state(self) -> Iterator[ParamState]:
        """Yields full parameters with their moments, one at a time, by canonical name."""
        ...


def global_targets(microbatches: Sequence[Batch], mesh: Mesh) -> int:
    """Number of valid target tokens of a step over all data-parallel ranks. Collective."""
    return int(mesh.sum(sum(batch.n_targets for batch in microbatches))[0]) // mesh.tp


def step_stats(nll: Tensor, squares: Tensor, tokens: int, mesh: Mesh) -> StepStats:
    """Computes the statistics of a step before its update is applied or skipped. Collective.

    The squared norms also serve as the finite check, so that no other reduction is needed. All
    values are read in one device synchronization, the only one in a step: the decision whether to
    apply the update depends on them, in DeepSpeed on the CPU.

    Args:
        nll: this rank's sum of the negative log-likelihood over targets, float64.
        squares: this rank's part of the squared gradient norms by clip index, float64 `[n]`.
        tokens: number of valid targets of the global batch.
        mesh: the process mesh.
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

    The result is not finite if a gradient is not finite. In the sum over tensor-parallel ranks,
    each element of the full parameters counts once. The result stays on the device.
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
    """The values as a cached device tensor: they are constant, and a copy synchronizes."""
    return torch.tensor(values, dtype=torch.float64, device=device)
