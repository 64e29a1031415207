"""FSDP2 behind the Engine protocol: parameters sharded by dimension 0 over data-parallel ranks."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from leviathan.checkpoint.store import SaveFuture
from leviathan.config.plan import RunPlan
from leviathan.config.run import Fsdp2Config
from leviathan.data.loader import Batch
from leviathan.engine.base import (
    ParamState,
    StepStats,
    global_targets,
    prepare_blocks,
    squared_norms,
    step_stats,
)
from leviathan.engine.sharded_state import OptimizerShard, ShardedState
from leviathan.errors import ConfigError
from leviathan.model.head import TokenScores
from leviathan.model.transformer import CausalLM
from leviathan.optim import build_optimizer
from leviathan.parallel.mesh import Mesh
from leviathan.parallel.tensor_parallel import NamedTensors, apply_tp


class Fsdp2Engine:
    """Full or hybrid sharding (HSDP); fp32, or bf16 with fp32 masters and fp32 reduction.

    AdamW updates this rank's shards as plain tensors that share memory with FSDP2's shards: the
    same optimizer as in the other engines, without the overhead of distributed tensors.
    """

    def __init__(self, model_factory: Callable[[], CausalLM], plan: RunPlan, mesh: Mesh) -> None:
        engine = plan.config.engine
        assert isinstance(engine, Fsdp2Config)
        if mesh.dp % engine.dp_replicate:
            raise ConfigError(
                "parallel.indivisible",
                f"engine.dp_replicate={engine.dp_replicate} does not divide the {mesh.dp} "
                "data-parallel ranks. Set engine.dp_replicate to a divisor of this number, or "
                "start another number of ranks",
            )
        self._mesh, self._replicas = mesh, engine.dp_replicate
        self.optimizer_steps = 0
        model = model_factory()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._layout = apply_tp(model, mesh.tp_group)
        parts = {name: tuple(p.shape) for name, p in model.named_parameters()}
        prepare_blocks(model, engine)
        policy = MixedPrecisionPolicy()
        if engine.precision == "bf16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        _shard(model, _device_mesh(mesh, engine.dp_replicate), policy)
        self._model = model
        self._sharded = cast(FSDPModule, model)
        self._adamw = build_optimizer(model, plan.config.optim)
        # While the model is gathered, its attributes are the full parameters: keep the shards.
        self._rows = dict(model.named_parameters())
        masters = {name: nn.Parameter(_local(p.detach())) for name, p in self._rows.items()}
        self._masters = {name: p for name, p in masters.items() if p.numel()}
        ours = {id(self._rows[name]): p for name, p in self._masters.items()}
        for group in self._adamw.param_groups:
            group["params"] = [ours[id(p)] for p in group["params"] if id(p) in ours]
        shards = [self._shard_of(name, parts[name]) for name in self._masters]
        background = plan.config.checkpoint.async_save
        self._state = ShardedState(shards, shapes, self._layout, self._adamw, mesh, background)

    def _shard_of(self, name: str, shape: tuple[int, ...]) -> OptimizerShard:
        """FSDP2 splits dimension 0 into equal parts, of which the last may be smaller."""
        ranks = self._mesh.dp // self._replicas
        replica, rank = divmod(self._mesh.dp_rank, ranks)
        master = self._masters[name]
        start = rank * -(-shape[0] // ranks) * (master.numel() // len(master))
        return OptimizerShard(
            name, shape, start, master.numel(), master, 0, replica, self._replicas
        )

    # ------------------------------------------------------------ training

    def train_step(self, microbatches: Sequence[Batch], lr: float) -> StepStats:
        """One optimizer step on this rank's part of a global batch; see `Engine`.

        Loss = Σ nll / number of valid targets, both over the global batch. FSDP2 averages
        gradients over the dp ranks, so each rank's sum is scaled by dp / number. Gradients are
        reduced after every micro-batch, so that no rank has a full gradient.
        """
        mesh = self._mesh
        tokens = global_targets(microbatches, mesh)
        scale = mesh.dp / max(1, tokens)
        nll = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._model.train()
        for number, batch in enumerate(microbatches, start=1):
            last = number == len(microbatches)
            self._sharded.set_is_last_backward(last)
            self._sharded.set_requires_all_reduce(last)
            batch = batch.to(mesh.device)
            loss_sum = self._model(batch.input_ids, batch.targets, batch.unique_ids, batch.inverse)
            nll += loss_sum.detach()
            (loss_sum * scale).backward()
        gradients = self._take_gradients()
        self._layout.sync_replicated_grads(gradients)
        squares = squared_norms(gradients, self._layout, self._adamw, mesh.device)
        stats = step_stats(nll, squares / self._replicas, tokens, mesh)
        if not stats.skipped:
            self._update(stats.clip_norms, lr)
        for master in self._masters.values():
            master.grad = None
        return stats

    def _take_gradients(self) -> NamedTensors:
        """Moves the reduced gradients of this rank's shards to AdamW's parameters."""
        for name, rows in self._rows.items():
            if name in self._masters and rows.grad is not None:
                self._masters[name].grad = _local(rows.grad)
            rows.grad = None
        return [(name, p.grad) for name, p in self._masters.items() if p.grad is not None]

    def _update(self, norms: Sequence[float], lr: float) -> None:
        self._adamw.clip(norms)
        self._adamw.set_lr(lr)
        self._adamw.step()
        self.optimizer_steps += 1

    @torch.no_grad()
    def score(self, batch: Batch) -> TokenScores:
        """Per-token nll and is-greedy `[B, T]` of this rank's samples."""
        batch = batch.to(self._mesh.device)
        self._model.eval()
        scores = self._model(
            batch.input_ids, batch.targets, batch.unique_ids, batch.inverse, output="scores"
        )
        self._sharded.reshard()  # without a backward pass the last weights remain gathered
        return scores

    # ------------------------------------------------------------ state

    def save(self, directory: Path) -> SaveFuture:
        """See `ShardedState.save`."""
        return self._state.save(directory)

    def load(self, directory: Path) -> None:
        """See `ShardedState.load`."""
        self.optimizer_steps = self._state.load(directory)

    def iter_full_state(self) -> Iterator[ParamState]:
        """See `ShardedState.iter_full_state`."""
        return self._state.iter_full_state()


def _local(sharded: Tensor) -> Tensor:
    """This rank's shard, sharing memory with the sharded tensor."""
    return cast(DTensor, sharded).to_local()


def _device_mesh(mesh: Mesh, replicas: int) -> DeviceMesh:
    """The data-parallel ranks: one dimension, or two for HSDP (replicas outermost)."""
    shape = (replicas, mesh.dp // replicas, mesh.tp)
    mesh_2d = init_device_mesh(
        mesh.device.type, shape, mesh_dim_names=("replicate", "shard", "tensor")
    )
    return mesh_2d["shard"] if replicas == 1 else mesh_2d["replicate", "shard"]


def _shard(model: CausalLM, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shards one parameter group per block; a tied table stays in the root group with the head."""
    parts: list[nn.Module] = list(model.model.layers)
    if not model.lm_head.tied:
        parts.insert(0, model.model.embed_tokens)
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
