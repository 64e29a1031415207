"""Tensor parallelism for an existing model: plain tensors and autograd-aware collectives.

A column-parallel product is preceded by `enter` (identity forward, sum backward) and a row-parallel
product is followed by `total` (sum forward, identity backward). Source: arXiv 1909.08053, section
3. Parameters remain plain tensors, so the same model works with FSDP2 and every ZeRO stage.

The norms are not sequence-parallel (arXiv 2205.05198): the two norms of a block take 2.5 % of its
time on a CPU, of which tp 2 would save half, but each sum would become two collectives that
together send as many bytes. It would only save memory, and activation checkpointing saves more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leviathan.errors import ConfigError
from leviathan.model.tp_layout import NO_TP, Partial, Shard, TPGroup, TPPlan

NamedTensors = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class TPLayout:
    """How the ranks of a tensor-parallel group share the parameters of a model.

    Attributes:
        peers: the tensor-parallel ranks.
        plan: canonical name → how a parameter is shared; all others are replicated.
    """

    tp_group: TPGroup = NO_TP
    plan: TPPlan = field(default_factory=dict)

    def shard(self, name: str) -> Shard | None:
        """How a parameter is sharded; None if every rank has the full parameter."""
        how = self.plan.get(name)
        return how if isinstance(how, Shard) else None

    def weight(self, name: str) -> float:
        """Weight of this rank's elements of a parameter in a sum over all ranks' elements."""
        return 1.0 if self.shard(name) else 1 / self.tp_group.size

    @torch.no_grad()
    def sync_replicated_grads(self, gradients: NamedTensors) -> None:
        """Synchronizes the gradients of replicated parameters over the ranks, once per step.

        Partial gradients are summed. The others are averaged: they differ at most by the order of
        summation on a device, and the mean keeps parameters bitwise identical on all ranks.

        Args:
            gradients: tensors of the same names and sizes on every rank; modified in place.
        """
        replicated = [(name, gradient) for name, gradient in gradients if not self.shard(name)]
        if self.tp_group.size == 1 or not replicated:
            return
        wide = torch.promote_types(replicated[0][1].dtype, torch.float32)
        sums = self.tp_group.sum_(
            torch.cat([gradient.flatten().to(wide) for _, gradient in replicated])
        )
        sizes = [gradient.numel() for _, gradient in replicated]
        for (name, gradient), total in zip(replicated, sums.split(sizes), strict=True):
            if not isinstance(self.plan.get(name), Partial):
                total /= self.tp_group.size
            gradient.copy_(total.view_as(gradient))


class ProcessTPGroup(TPGroup):
    """The tensor-parallel ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """See `TPGroup`; `x` is not copied."""
        return _CopyToTP.apply(x, self)

    def reduce_from_tp(self, x: Tensor) -> Tensor:
        """See `TPGroup`."""
        return _ReduceFromTP.apply(x, self)

    def gather_from_tp(self, x: Tensor, dim: int) -> Tensor:
        """See `TPGroup`."""
        return _GatherFromTP.apply(x, dim % x.dim(), self)

    def sum_(self, x: Tensor) -> Tensor:
        """See `TPGroup`; `x` is contiguous."""
        dist.all_reduce(x, group=self.group)
        return x

    def highest_(self, x: Tensor) -> Tensor:
        """See `TPGroup`; `x` is contiguous."""
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def __deepcopy__(self, memo: Any) -> "ProcessTPGroup":
        return self  # a copied model uses the same ranks; a process group cannot be copied


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ProcessTPGroup) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum_(grad.contiguous().clone()), None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: ProcessTPGroup) -> Tensor:
        return peers.sum_(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, peers: ProcessTPGroup) -> Tensor:
        ctx.dim, ctx.peers = dim, peers
        parts = [x.new_empty(x.shape) for _ in range(peers.size)]
        dist.all_gather(parts, x.contiguous(), group=peers.group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Gradients of activations are equal on all ranks, so this rank's part needs no sum.
        return grad.chunk(ctx.peers.size, ctx.dim)[ctx.peers.rank].contiguous(), None, None


@torch.no_grad()
def apply_tp(model: nn.Module, group: dist.ProcessGroup) -> TPLayout:
    """Shards the parameters of a full model in place and sets the `tp` ranks of its modules.

    Args:
        model: initialized model, identical on all ranks of the group.
        group: the tensor-parallel ranks.

    Returns:
        How each parameter is shared.

    Raises:
        ConfigError: a dimension to shard is not divisible by the number of ranks.
    """
    peers = ProcessTPGroup(group)
    if peers.size == 1:
        return TPLayout()
    shared = list(_shared(model))
    cut = [(name, p, how) for name, p, how in shared if isinstance(how, Shard)]
    for name, parameter, shard in cut:
        if parameter.shape[shard.dim] % peers.size:
            raise ConfigError(
                "parallel.indivisible",
                f"parallel.tp={peers.size} does not divide dimension {shard.dim} of {name} "
                f"{tuple(parameter.shape)}. Set parallel.tp to a divisor",
            )
    for _, parameter, shard in cut:
        mine = parameter.chunk(peers.size, shard.dim)[peers.rank]
        parameter.data = mine.clone(memory_format=torch.contiguous_format)
    for module in model.modules():
        if isinstance(getattr(module, "tp", None), TPGroup):
            cast(Any, module).tp = peers
    return TPLayout(peers, {name: how for name, _, how in shared})


def _shared(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard | Partial]]:
    """The parameters in the modules' plans; a tied parameter once, with its first name."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for local, how in getattr(module, "tp_layout", dict)().items():
            parameter = module.get_parameter(local)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{local}" if prefix else local, parameter, how
