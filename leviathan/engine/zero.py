"""Where DeepSpeed keeps masters, moments and gradients at each ZeRO stage.

All knowledge of DeepSpeed's insides is here, reduced to two questions: which flat slices of fp32
masters does this rank hold, and which reduced gradients? Nothing here imports DeepSpeed; `wrapped`
is what `deepspeed.initialize` made of our optimizer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leviathan.engine.shards import Shard


def shards_of(module: nn.Module, wrapped: Any, stage: int, rank: int, ranks: int) -> list[Shard]:
    """This rank's shards, in the order of `named_parameters`."""
    if stage == 3:
        return list(_stage_three(module, wrapped, rank))
    if stage in (1, 2):
        return list(_stages_one_and_two(module, wrapped))
    return list(_stage_zero(module, wrapped, rank, ranks))


def _stage_zero(module: nn.Module, wrapped: Any, rank: int, ranks: int) -> Iterator[Shard]:
    """Plain AdamW in fp32; in bf16 DeepSpeed's wrapper keeps an fp32 copy of each parameter."""
    masters = {}
    if hasattr(wrapped, "fp32_groups"):
        for low, high in zip(wrapped.fp16_groups, wrapped.fp32_groups, strict=True):
            masters |= {id(p): master for p, master in zip(low, high, strict=True)}
    for name, p in module.named_parameters():
        master = masters.get(id(p), p)
        yield Shard(name, tuple(p.shape), 0, p.numel(), master, 0, copy=rank, copies=ranks)


def _stages_one_and_two(module: nn.Module, wrapped: Any) -> Iterator[Shard]:
    """Each group's parameters lie end to end; the ranks hold equal cuts of that."""
    for name, parameter in module.named_parameters():
        p: Any = parameter
        mapping = p._hp_mapping
        if mapping is not None:
            ours, master = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = wrapped.optimizer.param_groups[mapping.param_group_index]["params"][0]
            yield Shard(name, tuple(p.shape), ours.start, ours.numel, flat, master.start)


def _stage_three(module: nn.Module, wrapped: Any, rank: int) -> Iterator[Shard]:
    """Each parameter is cut into equal parts, the last ones padded."""
    for name, parameter in module.named_parameters():
        p: Any = parameter
        group, offset, padded = wrapped.grad_position[wrapped.get_param_id(p)]
        start = min(rank * padded, p.ds_numel)
        count = min(padded, p.ds_numel - start)
        flat = wrapped.fp32_partitioned_groups_flat[group]
        yield Shard(name, tuple(p.ds_shape), start, count, flat, offset)


def reduced_gradients(module: nn.Module, wrapped: Any) -> tuple[list[Tensor], bool]:
    """After the last backward pass of a step: its gradients, and whether all ranks hold the same.

    Sharded lists may hold padding, which is zero. With the optimizer on the CPU, the masters there
    have got them already.
    """
    if getattr(wrapped, "cpu_offload", False):
        return [p.grad for p in wrapped.single_partition_of_fp32_groups], False
    if getattr(wrapped, "offload_optimizer", False):
        return [p.grad for p in wrapped.fp32_partitioned_groups_flat], False
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
