"""AdamW, its parameter groups and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from leviathan.config.schema import OptimConfig

FUSED_ON = ("cpu", "cuda")  # devices for which torch has a fused AdamW


def lr_at(optim: OptimConfig, steps: int, step: int) -> float:
    """The learning rate of one optimizer step; no state, so a resume cannot get it wrong.

    Linear warm-up that reaches the peak with step `warmup_steps - 1`, then one of

    - cosine: from the peak to `final_lr_ratio` of it with the last step,
    - wsd (warm-up, stable, decay): the peak, but over the last `decay_fraction` of the run's steps
      a straight line that reaches `final_lr_ratio` with the last one (arXiv 2404.06395, section 4),
    - constant: the peak throughout.

    Args:
        optim: peak, warm-up and form.
        steps: length of the whole run in optimizer steps.
        step: the step about to be taken, counted from 0.
    """
    assert 0 <= step < steps
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        decay_steps = min(max(1, round(optim.decay_fraction * steps)), steps - optim.warmup_steps)
        height = min(1.0, (steps - 1 - step) / decay_steps)
    else:
        progress = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps - 1)
        height = 0.5 * (1 + math.cos(math.pi * progress))
    return optim.lr * (optim.final_lr_ratio + (1 - optim.final_lr_ratio) * height)


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Parameters of two or more dimensions decay, gains and biases do not.

    Without weight decay there is one group: fewer groups are larger and evenly cut partitions.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not optim.weight_decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    decayed = [p for p in parameters if p.ndim >= 2]
    plain = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class GuardedAdamW(torch.optim.AdamW):
    """torch's AdamW with a veto and a clip: what an engine that bundles its step cannot be told.

    Attributes:
        veto: while it is set, `step` touches neither weights nor moments. So an engine can be run
            through a step whose gradients are not finite, and come out as it went in.
        shrink: what `step` multiplies gradients with, in the masters' fp32 and whatever the engine.
    """

    veto: bool = False
    shrink: float = 1.0

    def clip(self, norm: float, highest: float) -> None:
        """Has gradients of the global `norm` shrunk to the norm `highest`, if they are larger."""
        self.shrink = min(1.0, highest / (norm + 1e-6))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One AdamW update, or nothing while `veto` is set."""
        if self.veto:
            return None
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if self.shrink < 1 and gradients:
            torch._foreach_mul_(gradients, self.shrink)  # pyright: ignore[reportPrivateImportUsage]
        return super().step(closure)


def build_optimizer(model: nn.Module, optim: OptimConfig) -> GuardedAdamW:
    """The one optimizer of every engine; fused where there is a kernel: one pass, not eight."""
    fused = all(p.device.type in FUSED_ON for p in model.parameters())
    return GuardedAdamW(
        parameter_groups(model, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused
    )
