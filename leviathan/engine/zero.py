"""Locates DeepSpeed's master weights, moments and gradients at each ZeRO stage.

All code that depends on DeepSpeed's internals is here: it finds the flat slices of fp32 masters and
the reduced gradients on this rank. This module does not import DeepSpeed; `wrapped` is the
optimizer that `deepspeed.initialize` returns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from leviathan.engine.shards import OptimizerShard
from leviathan.parallel.tensor_parallel import NamedTensors


@dataclass(frozen=True)
class DataParallel:
    """The `mpu` object of DeepSpeed: the data-parallel ranks.

    It hides tensor parallelism: DeepSpeed would use it only for norms and clipping, which this
    package computes itself.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks with the same part of the model."""
        return self.group

    def get_data_parallel_rank(self) -> int:
        """This rank's index in the group."""
        return self.rank

    def get_data_parallel_world_size(self) -> int:
        """The size of the group."""
        return self.size

    def get_model_parallel_group(self) -> None:
        """Always None."""

    def get_model_parallel_rank(self) -> int:
        """Always 0."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """Always 1."""
        return 1


def shards_of(
    module: nn.Module, wrapped: Any, stage: int, rank: int, ranks: int
) -> list[OptimizerShard]:
    """This rank's shards, in the order of `named_parameters`."""
    if stage == 3:
        return list(_stage_three(module, wrapped, rank))
    if stage in (1, 2):
        return list(_stages_one_and_two(module, wrapped))
    return list(_stage_zero(module, wrapped, rank, ranks))


def _stage_zero(module: nn.Module, wrapped: Any, rank: int, ranks: int) -> Iterator[OptimizerShard]:
    """In fp32 the parameters; in bf16 the fp32 copies that DeepSpeed's wrapper keeps."""
    masters = {}
    if hasattr(wrapped, "fp32_groups"):
        for low, high in zip(wrapped.fp16_groups, wrapped.fp32_groups, strict=True):
            masters |= {id(p): master for p, master in zip(low, high, strict=True)}
    for name, p in module.named_parameters():
        master = masters.get(id(p), p)
        yield OptimizerShard(name, tuple(p.shape), 0, p.numel(), master, 0, copy=rank, copies=ranks)


def _stages_one_and_two(module: nn.Module, wrapped: Any) -> Iterator[OptimizerShard]:
    """Each group's parameters are concatenated; the ranks hold equal partitions of that."""
    for name, parameter in module.named_parameters():
        p: Any = parameter
        mapping = p._hp_mapping
        if mapping is not None:
            ours, master = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = wrapped.optimizer.param_groups[mapping.param_group_index]["params"][0]
            yield OptimizerShard(name, tuple(p.shape), ours.start, ours.numel, flat, master.start)


def _stage_three(module: nn.Module, wrapped: Any, rank: int) -> Iterator[OptimizerShard]:
    """Each parameter is split into equal parts, the last ones padded."""
    for name, parameter in module.named_parameters():
        p: Any = parameter
        group, offset, padded = wrapped.grad_position[wrapped.get_param_id(p)]
        start = min(rank * padded, p.ds_numel)
        count = min(padded, p.ds_numel - start)
        flat = wrapped.fp32_partitioned_groups_flat[group]
        yield OptimizerShard(name, tuple(p.ds_shape), start, count, flat, offset)


def reduced_gradients(
    module: nn.Module, wrapped: Any, shards: Sequence[OptimizerShard]
) -> tuple[NamedTensors, bool]:
    """The gradients after a step's last backward pass, and whether all ranks hold the same.

    The optimizer step uses these tensors: writing to them changes the update. They may end with
    zero padding.
    """
    if getattr(wrapped, "cpu_offload", False) or getattr(wrapped, "offload_optimizer", False):
        # The gradients are already in the masters on the CPU.
        return [
            (s.name, s.view_of(s.master.grad)) for s in shards if s.master.grad is not None
        ], False
    if hasattr(wrapped, "averaged_gradients"):
        parameters = getattr(wrapped, "params_in_partition", None) or wrapped.fp16_groups
        return _named(module, parameters, wrapped.averaged_gradients), False
    if hasattr(wrapped, "fp32_groups_gradients"):
        return _named(module, wrapped.bf16_groups, wrapped.fp32_groups_gradients), True
    return [(n, p.grad) for n, p in module.named_parameters() if p.grad is not None], True


def _named(module: nn.Module, parameters: Any, gradients: Any) -> NamedTensors:
    """Names the gradients, given per group in parameter order and possibly followed by padding."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        (names[id(p)], gradient)
        for number, group in enumerate(parameters)
        for p, gradient in zip(group, gradients[number] or (), strict=False)
    ]


def copy_masters_to_model(wrapped: Any) -> None:
    """Copies modified masters to the model's parameters on every rank. Collective."""
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
