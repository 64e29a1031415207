"""Tensor parallelism for a finished model: plain tensors, and collectives that autograd knows.

Column-parallel work is entered by `enter` (identity forward, sum backward) and left, after a
row-parallel product, by `total` (sum forward, identity backward). Source: arXiv 1909.08053, section
3. Parameters stay plain tensors, so the same model serves FSDP2 and every ZeRO stage.

The norms are not cut along the sequence (arXiv 2205.05198): a block's two take 2.5 % of its time on
a CPU, of which tp 2 would save half; for that each sum would become two collectives that send as
many bytes as the one. It would pay in memory alone, and there activation checkpointing does more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leviathan.errors import ConfigError
from leviathan.model.shards import ALONE, Partial, Peers, Plan, Shard

NamedTensors = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Layout:
    """How the ranks of a tensor-parallel group share the parameters of a model.

    Attributes:
        peers: the ranks.
        plan: canonical name → how a parameter is shared; the others are whole everywhere.
    """

    peers: Peers = ALONE
    plan: Plan = field(default_factory=dict)

    def cut(self, name: str) -> Shard | None:
        """How a parameter is cut; None where each rank has all of it."""
        how = self.plan.get(name)
        return how if isinstance(how, Shard) else None

    def weight(self, name: str) -> float:
        """What this rank's elements of a parameter count in a sum over the ranks' elements."""
        return 1.0 if self.cut(name) else 1 / self.peers.size

    @torch.no_grad()
    def settle(self, gradients: NamedTensors) -> None:
        """Once a step, gives all ranks the same gradients of the parameters that each has whole.

        Partial ones are summed. The others ought to be equal: their mean is taken, so that they
        are to the last bit, and the parameters stay so, whatever a device's sums depend on.

        Args:
            gradients: equally large pieces under the same names on every rank; changed in place.
        """
        whole = [(name, gradient) for name, gradient in gradients if not self.cut(name)]
        if self.peers.size == 1 or not whole:
            return
        wide = torch.promote_types(whole[0][1].dtype, torch.float32)
        sums = self.peers.sum_(torch.cat([gradient.flatten().to(wide) for _, gradient in whole]))
        sizes = [gradient.numel() for _, gradient in whole]
        for (name, gradient), total in zip(whole, sums.split(sizes), strict=True):
            if not isinstance(self.plan.get(name), Partial):
                total /= self.peers.size
            gradient.copy_(total.view_as(gradient))


class GroupPeers(Peers):
    """Peers that are the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def enter(self, x: Tensor) -> Tensor:
        """See `Peers`; `x` is not copied."""
        return _Enter.apply(x, self)

    def total(self, x: Tensor) -> Tensor:
        """See `Peers`."""
        return _Total.apply(x, self)

    def joined(self, x: Tensor, dim: int) -> Tensor:
        """See `Peers`."""
        return _Joined.apply(x, dim % x.dim(), self)

    def sum_(self, x: Tensor) -> Tensor:
        """See `Peers`; `x` is contiguous."""
        dist.all_reduce(x, group=self.group)
        return x

    def highest_(self, x: Tensor) -> Tensor:
        """See `Peers`; `x` is contiguous."""
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def __deepcopy__(self, memo: Any) -> "GroupPeers":
        return self  # a copied model has the same peers; a process group cannot be copied


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: GroupPeers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum_(grad.contiguous().clone()), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: GroupPeers) -> Tensor:
        return peers.sum_(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, peers: GroupPeers) -> Tensor:
        ctx.dim, ctx.peers = dim, peers
        parts = [x.new_empty(x.shape) for _ in range(peers.size)]
        dist.all_gather(parts, x.contiguous(), group=peers.group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Equal on all ranks, as gradients of activations are: the own part needs no sum.
        return grad.chunk(ctx.peers.size, ctx.dim)[ctx.peers.rank].contiguous(), None, None


@torch.no_grad()
def apply_tp(model: nn.Module, group: dist.ProcessGroup) -> Layout:
    """Cuts the parameters of a whole model in place and gives its modules their peers.

    Args:
        model: with its values set, equal on all ranks of the group.
        group: the tensor-parallel ranks.

    Returns:
        How each parameter is shared now.

    Raises:
        ConfigError: a parameter cannot be cut into so many equal parts.
    """
    peers = GroupPeers(group)
    if peers.size == 1:
        return Layout()
    shared = list(_shared(model))
    cut = [(name, p, how) for name, p, how in shared if isinstance(how, Shard)]
    for name, parameter, shard in cut:
        if parameter.shape[shard.dim] % peers.size:
            raise ConfigError(
                "parallel.indivisible",
                f"parallel.tp={peers.size} does not divide dimension {shard.dim} of {name} "
                f"{tuple(parameter.shape)}",
            )
    for _, parameter, shard in cut:
        mine = parameter.chunk(peers.size, shard.dim)[peers.rank]
        parameter.data = mine.clone(memory_format=torch.contiguous_format)
    for module in model.modules():
        if isinstance(getattr(module, "tp", None), Peers):
            cast(Any, module).tp = peers
    return Layout(peers, {name: how for name, _, how in shared})


def _shared(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard | Partial]]:
    """The parameters that modules' plans name; a tied one once, under its first name."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for local, how in getattr(module, "tp_plan", dict)().items():
            parameter = module.get_parameter(local)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{local}" if prefix else local, parameter, how
