"""Each rank's part of the model and optimizer state, as flat slices of fp32 master weights.

In every engine, a rank's part of a parameter is a contiguous range of its elements in row-major
order: a ZeRO partition, an FSDP2 shard, or the full parameter. With tensor parallelism it is a
range of a tensor-parallel part. Saving, loading and assembling full parameters use only this.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from leviathan.checkpoint.dcp import Chunk, FlatShard, check_tensors, load_shards, save_shards
from leviathan.checkpoint.layout import read_state
from leviathan.checkpoint.store import MOMENTS, PREFIXES, SaveFuture
from leviathan.engine.base import ParamState
from leviathan.model.tp_layout import Shard as Cut
from leviathan.model.tp_layout import TPGroup
from leviathan.optim import GuardedAdamW
from leviathan.parallel.mesh import Mesh
from leviathan.parallel.tensor_parallel import TPLayout


@dataclass(frozen=True)
class OptimizerShard:
    """The part of one parameter that this rank's AdamW updates."""

    name: str
    shape: tuple[int, ...]  # in this rank's model: with tensor parallelism possibly a part
    start: int  # first element in the flattened parameter
    count: int
    master: Tensor  # fp32, any shape: the parameter that AdamW updates
    offset: int  # first element in the flattened master
    copy: int = 0  # index of this replica among `copies`, each held by other ranks
    copies: int = 1
    chunk: Chunk | None = None  # the part of the full parameter that `shape` covers; None: all

    def with_tp_group(self, peers: TPGroup, cut: Cut | None) -> "OptimizerShard":
        """Returns the shard with its position among the tensor-parallel ranks.

        Args:
            peers: the tensor-parallel ranks, which hold the other parts or replicas.
            cut: how the parameter is split; None if it is replicated.
        """
        if cut is None:
            copy = self.copy * peers.size + peers.rank
            return replace(self, copy=copy, copies=self.copies * peers.size)
        offsets = [0] * len(self.shape)
        offsets[cut.dim] = peers.rank * self.shape[cut.dim]
        return replace(self, chunk=Chunk(tuple(offsets), self.shape))

    @property
    def weight(self) -> Tensor:
        """`[count]` view of the fp32 master."""
        return self.view_of(self.master.detach())

    def tensors(self, optimizer: GuardedAdamW) -> dict[str, Tensor]:
        """Prefix in a checkpoint → `[count]` view of the weight and both moments."""
        state = _state_of(optimizer, self.master)
        return dict(
            zip(PREFIXES, (self.weight, *(self.view_of(state[k]) for k in MOMENTS)), strict=True)
        )

    def view_of(self, full: Tensor) -> Tensor:
        """`[count]` view of this shard in a tensor of the master's size."""
        return full.view(-1).narrow(0, self.offset, self.count)


def _state_of(optimizer: GuardedAdamW, master: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a master; initialized as AdamW does if there is none."""
    state = optimizer.state[master]
    if not state:
        fused = optimizer.defaults["fused"]
        state["step"] = torch.tensor(0.0, device=master.device if fused else "cpu")
        for key in MOMENTS:
            state[key] = torch.zeros_like(master, requires_grad=False)
    return state


class ShardedState:
    """This rank's shards of the weights and moments of one model.

    Args:
        shards: in the order of `shapes`, without the parameters that have no part on this rank.
        shapes: canonical name → full shape, of all parameters.
        layout: how tensor-parallel ranks share the parameters.
        optimizer: the optimizer with the moments.
        mesh: the process mesh.
        background: whether `save` is asynchronous and returns after copying to the CPU.
    """

    def __init__(
        self,
        shards: list[OptimizerShard],
        shapes: Mapping[str, tuple[int, ...]],
        layout: TPLayout,
        optimizer: GuardedAdamW,
        mesh: Mesh,
        background: bool,
    ) -> None:
        self._shards = [s.with_tp_group(layout.tp_group, layout.shard(s.name)) for s in shards]
        self._shapes = shapes
        self._optimizer, self._mesh = optimizer, mesh
        self._background = background
        self._copies: dict[str, Tensor] = {}  # reused: allocating pages costs more than copying

    def save(self, directory: Path) -> SaveFuture:
        """Every rank writes its chunks; replicas share the writing."""
        slices = list(self._slices(divide=True))
        if self._background:
            slices = [self._copied(piece) for piece in slices]
        group = self._mesh.checkpoint_group.group
        return SaveFuture(lambda: save_shards(slices, directory, group), self._background)

    def load(self, directory: Path) -> int:
        """Loads masters and moments from a checkpoint of any layout.

        Returns:
            The number of AdamW updates.

        Raises:
            CheckpointError: the checkpoint belongs to another model.
        """
        expected = {p + name: shape for name, shape in self._shapes.items() for p in PREFIXES}
        with self._mesh.sync_errors():
            check_tensors(directory, expected)
            updates = read_state(directory, optimizer_steps=int)["optimizer_steps"]
        load_shards(self._slices(divide=False), directory)
        for shard in self._shards:  # AdamW's bias correction
            _state_of(self._optimizer, shard.master)["step"].fill_(float(updates))
        return updates

    def fill_weights(self, full: Mapping[str, Tensor]) -> None:
        """Sets the masters from the unsharded parameters of this rank's model."""
        for shard in self._shards:
            part = full[shard.name].reshape(-1).narrow(0, shard.start, shard.count)
            shard.weight.copy_(part)

    def iter_full_state(self) -> Iterator[ParamState]:
        """Yields full fp32 parameters and moments, one parameter at a time. Collective."""
        held = {shard.name: shard for shard in self._shards}
        for name, shape in self._shapes.items():
            full = torch.zeros(3, *shape, device=self._mesh.device)
            shard = held.get(name)
            if shard is not None and shard.copy == 0:
                for row, piece in zip(full, self._slices_of(shard), strict=True):
                    for chunk in piece.chunks():
                        chunk.view_of(row).copy_(chunk.from_flat(piece.flat))
            dist.all_reduce(full)  # the slices do not overlap: adding zeros is exact
            yield ParamState(name, *full.cpu())

    def _slices(self, divide: bool) -> Iterator[FlatShard]:
        for shard in self._shards:
            copy, copies = (shard.copy, shard.copies) if divide else (0, 1)
            first, last = (shard.count * c // copies for c in (copy, copy + 1))
            for piece in self._slices_of(shard):
                yield replace(piece, start=piece.start + first, flat=piece.flat[first:last])

    def _slices_of(self, shard: OptimizerShard) -> Iterator[FlatShard]:
        """The slices of the weight and both moments."""
        shape = self._shapes[shard.name]
        for prefix, flat in shard.tensors(self._optimizer).items():
            yield FlatShard(prefix + shard.name, shape, shard.start, flat, shard.chunk)

    def _copied(self, piece: FlatShard) -> FlatShard:
        """A copy of the slice on the CPU, which training does not modify."""
        copy = self._copies.get(piece.key)
        if copy is None:
            copy = torch.empty_like(piece.flat, device="cpu")
            self._copies[piece.key] = copy
        copy.copy_(piece.flat)
        return replace(piece, flat=copy)
