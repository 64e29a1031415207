"""DeepSpeed ZeRO behind the Engine protocol. The only module that imports deepspeed."""

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from leviathan.checkpoint.save_future import SaveFuture
from leviathan.config.plan import RunPlan
from leviathan.config.schema import DeepSpeedConfig
from leviathan.data.loader import Batch
from leviathan.engine import zero
from leviathan.engine.base import ParamState, StepStats, global_targets, squared_norms, step_stats
from leviathan.engine.blocks import prepare_blocks
from leviathan.engine.deepspeed_json import deepspeed_json
from leviathan.engine.shards import ShardedState
from leviathan.errors import ConfigError
from leviathan.model.transformer import CausalLM, TokenScores
from leviathan.optim import build_optimizer
from leviathan.parallel.mesh import Mesh
from leviathan.parallel.tensor_parallel import apply_tp


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
                mpu=zero.DataParallel(mesh.dp_group, mesh.dp_rank, mesh.dp),
            )
        self._adamw.skip_step = False
        stage, rank = engine.zero_stage, mesh.dp_rank
        self._shards = zero.shards_of(self._ds.module, self._wrapped, stage, rank, mesh.dp)
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
        gradients, replicated = zero.reduced_gradients(self._ds.module, self._wrapped, self._shards)
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
        zero.copy_masters_to_model(self._wrapped)

    def iter_full_state(self) -> Iterator[ParamState]:
        """See `ShardedState.iter_full_state`."""
        return self._state.iter_full_state()
