"""AdamW, its parameter groups, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from leviathan.config.run import NOT_DECAYED, OptimConfig, ParamGroupConfig, Role
from leviathan.errors import ConfigError

FUSED_ON = ("cpu", "cuda")  # devices for which torch has a fused AdamW


def lr_at(optim: OptimConfig, steps: int, step: int) -> float:
    """The learning rate of one optimizer step, without state that a resume would have to restore.

    Linear warm-up that reaches the peak at step `warmup_steps - 1`, then one of

    - cosine: from the peak to `final_lr_ratio` of it at the last step,
    - wsd (warm-up, stable, decay): the peak, then over the last `decay_fraction` of the steps a
      linear decay to `final_lr_ratio` at the last step (arXiv 2404.06395, section 4),
    - constant: the peak.

    Args:
        optim: peak, warm-up and shape.
        steps: length of the run in optimizer steps.
        step: index of the next step, from 0.
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


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with the same resolved settings.

    Attributes:
        selector: selector of the group in `optim.groups`; "default" if no group matches.
        roles: parameter name → role.
        lr_scale: multiplier of the learning rate.
        weight_decay: decoupled weight decay of AdamW.
        betas: β₁ and β₂ of AdamW.
        clip: maximum gradient norm of all groups with this `selector`; None: clipped together with
            all other parameters without `clip`, under `optim.grad_clip`.
    """

    selector: str
    roles: dict[str, Role]
    lr_scale: float
    weight_decay: float
    betas: tuple[float, float]
    clip: float | None


def param_roles(model: nn.Module) -> dict[str, Role]:
    """Name → role of every parameter, from `param_roles` of the modules; shared parameters once."""
    roles: dict[str, Role] = {}
    for prefix, module in model.named_modules():
        for local, role in getattr(module, "param_roles", dict)().items():
            roles[f"{prefix}.{local}" if prefix else local] = role
    names = [name for name, _ in model.named_parameters()]
    missing = [name for name in names if name not in roles]
    assert not missing, f"no module declares the role of {missing}"
    return {name: roles[name] for name in names}


def resolve_groups(model: nn.Module, optim: OptimConfig) -> list[ParamGroup]:
    """The parameter groups of a model: one per selector and weight decay.

    Raises:
        ConfigError: a name pattern of `optim.groups` matches no parameter, or only parameters of
            earlier groups.
    """
    chosen: dict[str, int] = {}
    roles = param_roles(model)
    for number, group in enumerate(optim.groups):
        matching = [name for name, role in roles.items() if _matches(group, name, role)]
        free = [name for name in matching if name not in chosen]
        chosen |= dict.fromkeys(free, number)
        if not free and (group.name is not None or matching):
            reason = "earlier groups match all its parameters" if matching else "matches nothing"
            raise ConfigError(
                "optim.invalid_group",
                f"optim.groups.{number} ({group.selector}): {reason}. Examples of parameter names: "
                f"{', '.join(list(roles)[:3])}, …",
            )
    groups: dict[tuple[int | None, float], ParamGroup] = {}
    for name, role in roles.items():
        number = chosen.get(name)
        resolved = _resolved(None if number is None else optim.groups[number], role, optim)
        groups.setdefault((number, resolved.weight_decay), resolved).roles[name] = role
    return list(groups.values())


def _matches(group: ParamGroupConfig, name: str, role: Role) -> bool:
    return role == group.role if group.name is None else fnmatchcase(name, group.name)


def _resolved(group: ParamGroupConfig | None, role: Role, optim: OptimConfig) -> ParamGroup:
    """The settings of a group for parameters of one role, with defaults resolved."""
    decay = group.weight_decay if group is not None else None
    if decay is None:
        decay = 0.0 if role in NOT_DECAYED else optim.weight_decay
    if group is None:
        return ParamGroup("default", {}, 1.0, decay, optim.betas, None)
    betas = group.betas or optim.betas
    return ParamGroup(group.selector, {}, group.lr_scale, decay, betas, group.clip)


def describe_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """The resolved groups, one row per role in each group.

    Args:
        model: a model, possibly on the meta device.
        optim: configuration with `groups`.

    Returns:
        Rows with `selector, role, tensors, parameters, lr, lr_scale, weight_decay, betas, clip`;
        `lr` is the peak. A role in `optim.groups` without parameters has a row with 0 tensors.
    """
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    rows: list[dict[str, Any]] = []
    groups = resolve_groups(model, optim)
    found = {group.selector for group in groups}
    for unused in optim.groups:
        if unused.selector not in found and unused.role is not None:
            assert unused.role not in param_roles(model).values()
            resolved = _resolved(unused, unused.role, optim)
            groups.append(replace(resolved, roles={}))
    for group in groups:
        roles = list(dict.fromkeys(group.roles.values())) or [group.selector.removeprefix("role=")]
        for role in roles:
            names = [name for name, own in group.roles.items() if own == role]
            rows.append(
                {
                    "selector": group.selector,
                    "role": role,
                    "tensors": len(names),
                    "parameters": sum(sizes[name] for name in names),
                    "lr": optim.lr * group.lr_scale,
                    "lr_scale": group.lr_scale,
                    "weight_decay": group.weight_decay,
                    "betas": list(group.betas),
                    "clip": optim.grad_clip if group.clip is None else group.clip,
                    "clipped": "globally" if group.clip is None else "by group",
                }
            )
    return rows


class GuardedAdamW(torch.optim.AdamW):
    """AdamW of torch with skipping and clipping, for engines whose step cannot be split.

    Attributes:
        skip_step: while it is set, `step` changes neither weights nor moments, so that an engine
            can complete a step with non-finite gradients without effect.
        clip_index: parameter name → index of its gradient norm in the argument of `clip`.
    """

    skip_step: bool = False
    clip_index: Mapping[str, int] = MappingProxyType({})

    @property
    def clip_count(self) -> int:
        """Number of gradient norms that `clip` expects."""
        return 1 + max(group.get("clip_index", 0) for group in self.param_groups)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every group to `lr` times its scale."""
        for group in self.param_groups:
            group["lr"] = lr * group["lr_scale"]

    def clip(self, norms: Sequence[float]) -> None:
        """Scales the gradients of the next step so that no norm exceeds its maximum.

        Args:
            norms: L2 norm of the gradients by `clip_index`, over all ranks.
        """
        for group in self.param_groups:
            group["grad_scale"] = min(1.0, group["max_norm"] / (norms[group["clip_index"]] + 1e-6))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One AdamW update; does nothing while `skip_step` is set."""
        if self.skip_step:
            return None
        for group in self.param_groups:
            # in fp32 with every engine
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            if group.get("grad_scale", 1.0) < 1 and gradients:
                torch._foreach_mul_(gradients, group["grad_scale"])  # pyright: ignore[reportPrivateImportUsage]
        return super().step(closure)


def build_optimizer(model: nn.Module, optim: OptimConfig) -> GuardedAdamW:
    """The optimizer of all engines; uses the fused kernel where available.

    Raises:
        ConfigError: as `resolve_groups`.
    """
    fused = all(p.device.type in FUSED_ON for p in model.parameters())
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    clip_indices: dict[str, int] = {}
    clip_index: dict[str, int] = {}
    for group in resolve_groups(model, optim):
        index = 0
        if group.clip is not None:
            index = clip_indices.setdefault(group.selector, 1 + len(clip_indices))
        clip_index |= dict.fromkeys(group.roles, index)
        groups.append(
            {
                "params": [parameters[name] for name in group.roles],
                "lr_scale": group.lr_scale,
                "weight_decay": group.weight_decay,
                "betas": group.betas,
                "clip_index": index,
                "max_norm": optim.grad_clip if group.clip is None else group.clip,
            }
        )
    optimizer = GuardedAdamW(groups, lr=optim.lr, eps=optim.eps, fused=fused)
    optimizer.clip_index = clip_index
    return optimizer
