"""Where DeepSpeed keeps masters, moments and gradients at each ZeRO stage.

All knowledge of DeepSpeed's insides is here, reduced to two questions: which flat slices of fp32
masters does this rank hold, and which reduced gradients? Nothing here imports DeepSpeed; `wrapped`
is what `deepspeed.initialize` made of our optimizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leviathan.optim import GuardedAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """The part of one parameter that this rank's AdamW updates."""

    name: str
    shape: tuple[int, ...]
    start: int  # of the flattened parameter
    count: int
    master: Tensor  # fp32, any shape: what AdamW knows as a parameter
    offset: int  # of the flattened master
    replicated: bool  # every rank holds the same

    @property
    def weight(self) -> Tensor:
        """[count] view of the fp32 master."""
        return self._cut(self.master.detach())

    def moment(self, optimizer: GuardedAdamW, key: str) -> Tensor:
        """[count] view of one of AdamW's moments, made where there is none yet."""
        return self._cut(_state_of(optimizer, self.master)[key])

    def _cut(self, whole: Tensor) -> Tensor:
        return whole.view(-1).narrow(0, self.offset, self.count)


def _state_of(optimizer: GuardedAdamW, master: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a master; before its first step as AdamW would begin it."""
    state = optimizer.state[master]
    if not state:
        state["step"] = torch.tensor(0.0)
        for key in MOMENTS:
            state[key] = torch.zeros_like(master, requires_grad=False)
    return state


def set_step(optimizer: GuardedAdamW, shards: list[Shard], step: int) -> None:
    """Tells AdamW how many updates went before, for its bias correction."""
    for shard in shards:
        _state_of(optimizer, shard.master)["step"].fill_(float(step))


def shards_of(module: nn.Module, wrapped: Any, stage: int, rank: int) -> list[Shard]:
    """This rank's shards, in the order of `named_parameters`."""
    if stage == 3:
        return list(_stage_three(module, wrapped, rank))
    if stage in (1, 2):
        return list(_stages_one_and_two(module, wrapped))
    return list(_stage_zero(module, wrapped))


def _stage_zero(module: nn.Module, wrapped: Any) -> Iterator[Shard]:
    """Plain AdamW in fp32; in bf16 DeepSpeed's wrapper keeps an fp32 copy of each parameter."""
    masters = {}
    if hasattr(wrapped, "fp32_groups"):
        for low, high in zip(wrapped.fp16_groups, wrapped.fp32_groups, strict=True):
            masters |= {id(p): master for p, master in zip(low, high, strict=True)}
    for name, p in module.named_parameters():
        yield Shard(name, tuple(p.shape), 0, p.numel(), masters.get(id(p), p), 0, True)


def _stages_one_and_two(module: nn.Module, wrapped: Any) -> Iterator[Shard]:
    """Each group's parameters lie end to end; the ranks hold equal cuts of that."""
    for name, parameter in module.named_parameters():
        p: Any = parameter
        mapping = p._hp_mapping
        if mapping is not None:
            ours, master = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = wrapped.optimizer.param_groups[mapping.param_group_index]["params"][0]
            yield Shard(name, tuple(p.shape), ours.start, ours.numel, flat, master.start, False)


def _stage_three(module: nn.Module, wrapped: Any, rank: int) -> Iterator[Shard]:
    """Each parameter is cut into equal parts, the last ones padded."""
    for name, parameter in module.named_parameters():
        p: Any = parameter
        group, offset, padded = wrapped.grad_position[wrapped.get_param_id(p)]
        start = min(rank * padded, p.ds_numel)
        count = min(padded, p.ds_numel - start)
        flat = wrapped.fp32_partitioned_groups_flat[group]
        yield Shard(name, tuple(p.ds_shape), start, count, flat, offset, False)


def reduced_gradients(module: nn.Module, wrapped: Any) -> tuple[list[Tensor], bool]:
    """After the last backward pass of a step: its gradients, and whether all ranks hold the same.

    Sharded lists may hold padding, which is zero.
    """
    if hasattr(wrapped, "averaged_gradients"):
        shards = wrapped.averaged_gradients.values()
        return [g for group in shards for g in group or () if g is not None], False
    if hasattr(wrapped, "fp32_groups_gradients_flat"):
        return list(wrapped.fp32_groups_gradients_flat), True
    return [p.grad for p in module.parameters() if p.grad is not None], True


def masters_to_model(wrapped: Any) -> None:
    """After the masters were written to: brings the parameters that the model computes with in
    line, on every rank. Collective."""
    if hasattr(wrapped, "update_lp_params"):
        wrapped.update_lp_params()
    elif hasattr(wrapped, "fp32_partitioned_groups_flat"):
        for group in range(len(wrapped.fp32_partitioned_groups_flat)):
            wrapped._reassign_or_swap_out_partitioned_parameters(group)
        if wrapped.persistent_parameters:
            wrapped.persistent_parameters[0].partition(wrapped.persistent_parameters)
            wrapped.persistent_parameters[0].all_gather(wrapped.persistent_parameters)
    elif hasattr(wrapped, "fp32_groups"):
        with torch.no_grad():
            for low, high in zip(wrapped.fp16_groups, wrapped.fp32_groups, strict=True):
                for p, master in zip(low, high, strict=True):
                    p.copy_(master)
