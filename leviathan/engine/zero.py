"""Where DeepSpeed keeps masters, moments and gradients at each ZeRO stage.

All knowledge of DeepSpeed's insides is here, reduced to two questions: which flat slices of fp32
masters does this rank hold, and which reduced gradients? Nothing here imports DeepSpeed; `wrapped`
is what `deepspeed.initialize` made of our optimizer.
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
    """What DeepSpeed calls an mpu: the ranks among which it divides the work.

    Tensor-parallel ranks are kept from it. It would only use them for norms and clipping, and those
    are ours; so to DeepSpeed each of them is a model of its own.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks with the same part of the model."""
        return self.group

    def get_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.rank

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self.size

    def get_model_parallel_group(self) -> None:
        """None that DeepSpeed need know of."""

    def get_model_parallel_rank(self) -> int:
        """0."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """1."""
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
    """Plain AdamW in fp32; in bf16 DeepSpeed's wrapper keeps an fp32 copy of each parameter."""
    masters = {}
    if hasattr(wrapped, "fp32_groups"):
        for low, high in zip(wrapped.fp16_groups, wrapped.fp32_groups, strict=True):
            masters |= {id(p): master for p, master in zip(low, high, strict=True)}
    for name, p in module.named_parameters():
        master = masters.get(id(p), p)
        yield OptimizerShard(name, tuple(p.shape), 0, p.numel(), master, 0, copy=rank, copies=ranks)


def _stages_one_and_two(module: nn.Module, wrapped: Any) -> Iterator[OptimizerShard]:
    """Each group's parameters lie end to end; the ranks hold equal cuts of that."""
    for name, parameter in module.named_parameters():
        p: Any = parameter
        mapping = p._hp_mapping
        if mapping is not None:
            ours, master = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = wrapped.optimizer.param_groups[mapping.param_group_index]["params"][0]
            yield OptimizerShard(name, tuple(p.shape), ours.start, ours.numel, flat, master.start)


def _stage_three(module: nn.Module, wrapped: Any, rank: int) -> Iterator[OptimizerShard]:
    """Each parameter is cut into equal parts, the last ones padded."""
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
    """After the last backward pass of a step: its gradients, and whether all ranks hold the same.

    What is written into them, the step will use. Pieces may end with padding, which is zero.
    """
    if getattr(wrapped, "cpu_offload", False) or getattr(wrapped, "offload_optimizer", False):
        # The masters on the CPU have got them already.
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
    """Lists of gradients by group, each in the order of its parameters; padding may follow them."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        (names[id(p)], gradient)
        for number, group in enumerate(parameters)
        for p, gradient in zip(group, gradients[number] or (), strict=False)
    ]


def copy_masters_to_model(wrapped: Any) -> None:
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
