"""DeepSpeed ZeRO behind the Engine protocol. The only module that imports deepspeed."""

import copy
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from leviathan.checkpoint.store import SaveFuture
from leviathan.config.plan import RunPlan
from leviathan.config.run import DeepSpeedConfig
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
from leviathan.estimate.layout import reduce_bucket
from leviathan.model.head import TokenScores
from leviathan.model.transformer import CausalLM
from leviathan.optim import build_optimizer
from leviathan.parallel.mesh import Mesh
from leviathan.parallel.tensor_parallel import NamedTensors, apply_tp

# ---------------------------------------------------------------- configuration

# DeepSpeed keys that are derived from our configuration → the key to set instead.
RESERVED = {
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "fp16": "engine.precision",
    "amp": "engine.precision",
    "torch_autocast": "engine.precision",
    "train_batch_size": "train.global_batch_size",
    "gradient_clipping": "optim.grad_clip",
    "tensor_parallel": "parallel.tp",
    "managed_gradient_accumulation": "train.micro_batch_size",
}


def deepspeed_json(plan: RunPlan) -> dict[str, Any]:
    """Builds the complete DeepSpeed configuration of a run.

    Raises:
        ConfigError: a key of `engine.extra` contradicts a value derived from the plan, or is
            invalid.
    """
    engine = plan.config.engine
    assert isinstance(engine, DeepSpeedConfig)
    derived: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.config.train.micro_batch_size,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": 0.0,  # AdamW clips: its norm handles tensor-parallel ranks correctly
        # The saved shards assume partitions in parameter order.
        "zero_optimization": {"stage": engine.zero_stage, "round_robin_gradients": False},
        "zero_allow_untested_optimizer": True,  # torch's AdamW that can skip a step
        "communication_data_type": "fp32",
        "bf16": {"enabled": engine.precision == "bf16"},
    }
    if engine.precision == "bf16" and engine.zero_stage > 0:
        # Stage 0 has no fp32 accumulation of bf16 gradients.
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
    if engine.offload_optimizer:
        derived["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        derived["zero_force_ds_cpu_optimizer"] = False  # see zero_allow_untested_optimizer
    for key, instead in RESERVED.items():
        if key in engine.extra:
            raise ConfigError(
                "engine.derived_key",
                f"engine.extra.{key}: this key is derived from the configuration. Set {instead} "
                "instead",
            )
    merged = copy.deepcopy(derived)
    merged["steps_per_print"] = 2**31 - 1
    # DeepSpeed allocates the full bucket, regardless of the model's size.
    merged["zero_optimization"]["reduce_bucket_size"] = reduce_bucket(plan.config.model)
    _merge(merged, engine.extra, derived, "engine.extra")
    every = merged["steps_per_print"]
    if type(every) is not int or every < 1:
        raise ConfigError(
            "engine.invalid_extra",
            f"engine.extra.steps_per_print={every!r}: expected an integer of at least 1",
        )
    return merged


def _merge(into: dict[str, Any], extra: dict[str, Any], derived: Any, path: str) -> None:
    for key, value in extra.items():
        fixed = derived.get(key) if isinstance(derived, dict) else None
        if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(key, {}), value, fixed, f"{path}.{key}")
        elif fixed is not None and fixed != value:
            raise ConfigError(
                "engine.derived_key",
                f"{path}.{key}={value!r}: this value is derived from the rest of the configuration "
                f"as {fixed!r}. Remove the key, or change the configuration",
            )
        else:
            into[key] = copy.deepcopy(value)


# ---------------------------------------------------------------- state
# All code that depends on DeepSpeed's internals is here: it finds the flat slices of fp32 masters
# and the reduced gradients on this rank. This module does not import DeepSpeed; `wrapped` is the
# optimizer that `deepspeed.initialize` returns.


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


# ---------------------------------------------------------------- engine


def _import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed with its log output reduced and without compilation on the CPU."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", module=r"deepspeed\..*")
    # DeepSpeed uses deprecated names of torch functions.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..* is deprecated", FutureWarning)
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # Its shared-memory all-reduce is compiled on first use, which takes minutes, leaves a lock
        # file after a killed run and 66 MiB per rank in /dev/shm. Gloo gives the same losses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _refused_keys(extra: Mapping[str, Any]) -> Iterator[None]:
    """Converts the errors that DeepSpeed raises for invalid `engine.extra` keys to ConfigError.

    A RuntimeError concerns the system (memory, communication) and is raised unchanged.
    """
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        if not extra:
            raise
        raise ConfigError(
            "engine.invalid_extra",
            f"engine.extra: DeepSpeed refused {dict(extra)}: {type(error).__name__}: {error}. "
            "Correct or remove these keys",
        ) from error


class DeepSpeedEngine:
    """ZeRO 0–3 over the data-parallel ranks; fp32, or bf16 with fp32 masters."""

    def __init__(self, model_factory: Callable[[], CausalLM], plan: RunPlan, mesh: Mesh) -> None:
        config, engine = deepspeed_json(plan), plan.config.engine
        assert isinstance(engine, DeepSpeedConfig)
        deepspeed = _import_deepspeed(mesh.device)
        self._mesh = mesh
        self.optimizer_steps = 0
        model = model_factory()
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._layout = apply_tp(model, mesh.tp_group)
        rounds = engine.precision == "bf16"
        exact = {n: p.detach().clone() for n, p in model.named_parameters() if rounds}
        prepare_blocks(model, engine)
        self._adamw = build_optimizer(model, plan.config.optim)
        # Some of its optimizers take a step on zero gradients during initialization, which would
        # decay the weights and advance AdamW's bias correction by one step.
        self._adamw.skip_step = True
        # bf16 at stage 1 prints its memory use during initialization.
        with redirect_stdout(io.StringIO()), _refused_keys(engine.extra):
            self._ds, self._wrapped, _, _ = deepspeed.initialize(
                model=model,
                optimizer=self._adamw,
                config=config,
                mpu=DataParallel(mesh.dp_group, mesh.dp_rank, mesh.dp),
            )
        self._adamw.skip_step = False
        stage, rank = engine.zero_stage, mesh.dp_rank
        self._shards = shards_of(self._ds.module, self._wrapped, stage, rank, mesh.dp)
        background = plan.config.checkpoint.async_save
        self._state = ShardedState(
            self._shards, shapes, self._layout, self._adamw, mesh, background
        )
        if exact:
            # DeepSpeed creates the masters from weights that are already rounded to bf16.
            self._state.fill_weights(exact)

    # ------------------------------------------------------------ training

    def train_step(self, microbatches: Sequence[Batch], lr: float) -> StepStats:
        """One optimizer step on this rank's part of a global batch; see `Engine`.

        Loss = Σ nll / number of valid targets, both over the global batch, independent of how the
        tokens are distributed over ranks and micro-batches. DeepSpeed averages gradients over the
        dp ranks, so each rank's sum is scaled by dp / number.
        """
        mesh = self._mesh
        tokens = global_targets(microbatches, mesh)
        scale = mesh.dp / max(1, tokens)
        self._adamw.set_lr(lr)
        nll = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._ds.train()
        for number, batch in enumerate(microbatches, start=1):
            batch = batch.to(mesh.device)
            self._ds.set_gradient_accumulation_boundary(number == len(microbatches))
            loss_sum = self._ds(batch.input_ids, batch.targets, batch.unique_ids, batch.inverse)
            nll += loss_sum.detach()
            self._ds.backward(loss_sum * scale, scale_wrt_gas=False)
        stats = step_stats(nll, self._gradient_squares(), tokens, mesh)
        self._adamw.skip_step = stats.skipped
        self._adamw.clip(stats.clip_norms)
        self._ds.step()
        self._adamw.skip_step = False
        self.optimizer_steps += not stats.skipped
        return stats

    def _gradient_squares(self) -> torch.Tensor:
        """This rank's part of the squared gradient norms by clip index.

        Also synchronizes the replicated gradients. DeepSpeed checks for infinities only in some
        stages and precisions, so this is the finite check of all of them.
        """
        gradients, replicated = reduced_gradients(self._ds.module, self._wrapped, self._shards)
        self._layout.sync_replicated_grads(gradients)
        squares = squared_norms(gradients, self._layout, self._adamw, self._mesh.device)
        return squares / self._mesh.dp if replicated else squares

    @torch.no_grad()
    def score(self, batch: Batch) -> TokenScores:
        """Per-token nll and is-greedy `[B, T]` of this rank's samples."""
        batch = batch.to(self._mesh.device)
        self._ds.eval()
        return self._ds.module(
            batch.input_ids, batch.targets, batch.unique_ids, batch.inverse, output="scores"
        )

    # ------------------------------------------------------------ state

    def save(self, directory: Path) -> SaveFuture:
        """See `ShardedState.save`."""
        return self._state.save(directory)

    def load(self, directory: Path) -> None:
        """See `ShardedState.load`."""
        self.optimizer_steps = self._state.load(directory)
        copy_masters_to_model(self._wrapped)

    def iter_full_state(self) -> Iterator[ParamState]:
        """See `ShardedState.iter_full_state`."""
        return self._state.iter_full_state()
