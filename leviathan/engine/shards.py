"""What every engine holds of the model, as flat slices of fp32 masters, and what is done with them.

However an engine cuts parameters up, a rank's part of one is a run of its elements in row-major
order: a ZeRO partition, some rows of an FSDP2 shard, or all of it. Under tensor parallelism that is
a run of the elements of a part. Saving, loading and assembling whole parameters need to know no
more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from leviathan.checkpoint.dcp import Chunk, FlatShard, check_tensors, load_shards, save_shards
from leviathan.checkpoint.layout import read_state
from leviathan.checkpoint.load import MOMENTS, PREFIXES
from leviathan.checkpoint.save_future import SaveFuture
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
    shape: tuple[int, ...]  # as this rank's model has it: under tensor parallelism perhaps a part
    start: int  # of the parameter, flattened
    count: int
    master: Tensor  # fp32, any shape: what AdamW knows as a parameter
    offset: int  # of the flattened master
    copy: int = 0  # which of `copies` equal ones, each held by other ranks, this is
    copies: int = 1
    chunk: Chunk | None = None  # the part of the whole parameter that `shape` is; None: all of it

    def with_tp_group(self, peers: TPGroup, cut: Cut | None) -> "OptimizerShard":
        """The same shard, with its place among tensor-parallel peers.

        Args:
            peers: ranks that have the other parts of the parameter, or the same one.
            cut: how it is cut; None: it is whole on all of them.
        """
        if cut is None:
            copy = self.copy * peers.size + peers.rank
            return replace(self, copy=copy, copies=self.copies * peers.size)
        offsets = [0] * len(self.shape)
        offsets[cut.dim] = peers.rank * self.shape[cut.dim]
        return replace(self, within=Chunk(tuple(offsets), self.shape))

    @property
    def weight(self) -> Tensor:
        """[count] view of the fp32 master."""
        return self.view_of(self.master.detach())

    def tensors(self, optimizer: GuardedAdamW) -> dict[str, Tensor]:
        """Prefix in a checkpoint → [count] view of what is held: weight and both moments."""
        state = _state_of(optimizer, self.master)
        return dict(
            zip(PREFIXES, (self.weight, *(self.view_of(state[k]) for k in MOMENTS)), strict=True)
        )

    def view_of(self, whole: Tensor) -> Tensor:
        """[count] view of what this shard is in a tensor as large as the master."""
        return whole.view(-1).narrow(0, self.offset, self.count)


def _state_of(optimizer: GuardedAdamW, master: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a master; before its first step as AdamW would begin it."""
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
        shards: in the order of `shapes`; parameters of which nothing is held are omitted.
        shapes: canonical name → whole shape, of all parameters.
        layout: how tensor-parallel ranks share the parameters.
        optimizer: whose moments these are.
        mesh: the ranks among which they lie.
        background: whether `save` returns as soon as it has a copy.
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
        self._copies: dict[str, Tensor] = {}  # kept: fresh pages cost more than the copying

    def save(self, directory: Path) -> SaveFuture:
        """Every rank writes the boxes it holds; ranks that hold copies share the writing."""
        slices = list(self._slices(divide=True))
        if self._background:
            slices = [self._copied(piece) for piece in slices]
        group = self._mesh.checkpoint_group.group
        return SaveFuture(lambda: save_shards(slices, directory, group), self._background)

    def load(self, directory: Path) -> int:
        """Fills masters and moments from a checkpoint of any layout; its number of updates.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        expected = {p + name: shape for name, shape in self._shapes.items() for p in PREFIXES}
        with self._mesh.sync_errors():
            check_tensors(directory, expected)
            updates = read_state(directory, optimizer_steps=int)["optimizer_steps"]
        load_shards(self._slices(divide=False), directory)
        for shard in self._shards:  # AdamW's bias correction
            _state_of(self._optimizer, shard.master)["step"].fill_(float(updates))
        return updates

    def fill_weights(self, whole: Mapping[str, Tensor]) -> None:
        """Sets the masters to the parameters as the rank's model has them, unsharded."""
        for shard in self._shards:
            part = whole[shard.name].reshape(-1).narrow(0, shard.start, shard.count)
            shard.weight.copy_(part)

    def iter_full_state(self) -> Iterator[ParamState]:
        """Whole fp32 parameters and moments, assembled one parameter at a time. Collective."""
        held = {shard.name: shard for shard in self._shards}
        for name, shape in self._shapes.items():
            whole = torch.zeros(3, *shape, device=self._mesh.device)
            shard = held.get(name)
            if shard is not None and shard.copy == 0:
                for row, piece in zip(whole, self._slices_of(shard), strict=True):
                    for box in piece.chunks():
                        box.view_of(row).copy_(box.from_flat(piece.flat))
            dist.all_reduce(whole)  # the slices do not overlap: adding zeros is exact
            yield ParamState(name, *whole.cpu())

    def _slices(self, divide: bool) -> Iterator[FlatShard]:
        for shard in self._shards:
            copy, copies = (shard.copy, shard.copies) if divide else (0, 1)
            first, last = (shard.count * c // copies for c in (copy, copy + 1))
            for piece in self._slices_of(shard):
                yield replace(piece, start=piece.start + first, flat=piece.flat[first:last])

    def _slices_of(self, shard: OptimizerShard) -> Iterator[FlatShard]:
        """Weight and both moments."""
        shape = self._shapes[shard.name]
        for prefix, flat in shard.tensors(self._optimizer).items():
            yield FlatShard(prefix + shard.name, shape, shard.start, flat, shard.chunk)

    def _copied(self, piece: FlatShard) -> FlatShard:
        """The same on the CPU, in memory that training does not touch."""
        copy = self._copies.get(piece.key)
        if copy is None:
            copy = torch.empty_like(piece.flat, device="cpu")
            self._copies[piece.key] = copy
        copy.copy_(piece.flat)
        return replace(piece, flat=copy)
