"""DeepSpeed ZeRO behind the Engine protocol. The only module that imports deepspeed."""

import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leviathan.checkpoint.boxes import Slice, check_tensors, load_slices, save_slices
from leviathan.checkpoint.layout import read_state
from leviathan.checkpoint.load import WEIGHTS
from leviathan.config.plan import RunPlan
from leviathan.data.stream import Batch
from leviathan.engine import zero
from leviathan.engine.base import ParamState, SaveHandle, StepStats
from leviathan.engine.deepspeed_json import deepspeed_json
from leviathan.errors import ConfigError
from leviathan.model.transformer import CausalLM, TokenScores
from leviathan.optim import build_optimizer
from leviathan.parallel.mesh import Mesh


def _import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed without its chatter, and without compiling anything on the CPU."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", module=r"deepspeed\..*")
    # It still calls by their former names what torch has renamed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..* is deprecated", FutureWarning)
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # Its shared-memory all-reduce is compiled on first use: minutes, a lock file that outlives
        # a killed run, and 66 MiB a rank left in /dev/shm. Gloo gives the same losses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _refused_keys(extra: Mapping[str, Any]) -> Iterator[None]:
    """DeepSpeed checks its configuration while it starts, with errors of many kinds.

    A RuntimeError is the machine's (memory, communication) and stays what it is.
    """
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        if not extra:
            raise
        raise ConfigError(
            f"engine.extra: DeepSpeed cannot start with {dict(extra)}: "
            f"{type(error).__name__}: {error}"
        ) from error


class DeepSpeedEngine:
    """ZeRO 0–3 over the data-parallel ranks; fp32, or bf16 with fp32 masters."""

    def __init__(self, model_factory: Callable[[], CausalLM], plan: RunPlan, mesh: Mesh) -> None:
        config = deepspeed_json(plan)
        deepspeed = _import_deepspeed(mesh.device)
        self._mesh = mesh
        self._stage = plan.config.engine.zero_stage
        self.optimizer_steps = 0
        model = model_factory()
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._adamw = build_optimizer(model, plan.config.optim)
        # bf16 at stage 1 prints its memory while it starts.
        with redirect_stdout(io.StringIO()), _refused_keys(plan.config.engine.extra):
            self._ds, self._wrapped, _, _ = deepspeed.initialize(
                model=model, optimizer=self._adamw, config=config
            )
        self._shards = zero.shards_of(self._ds.module, self._wrapped, self._stage, mesh.dp_rank)

    # ------------------------------------------------------------ training

    def train_step(self, microbatches: Sequence[Batch], lr: float) -> StepStats:
        """One optimizer step on this rank's part of a global batch; see `Engine`.

        Loss = Σ nll / number of valid targets, both over the global batch, however unequally the
        tokens lie on ranks and micro-batches. DeepSpeed averages gradients over the dp ranks, so
        each rank's sum is scaled by dp / number.
        """
        mesh = self._mesh
        valid = sum(batch.n_targets for batch in microbatches)
        tokens = int(mesh.sum(valid)[0]) // mesh.tp
        scale = mesh.dp / max(1, tokens)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        nll = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._ds.train()
        for number, batch in enumerate(microbatches, start=1):
            batch = batch.to(mesh.device)
            self._ds.set_gradient_accumulation_boundary(number == len(microbatches))
            loss_sum = self._ds(batch.input_ids, batch.targets, batch.unique_ids, batch.inverse)
            nll += loss_sum.detach()
            self._ds.backward(loss_sum * scale, scale_wrt_gas=False)
        nll_sum, squares = mesh.sum(float(nll) / mesh.tp, self._gradient_squares())
        finite = math.isfinite(nll_sum) and math.isfinite(squares)
        self._adamw.veto = not finite
        self._ds.step()
        self._adamw.veto = False
        self.optimizer_steps += finite
        norm = math.sqrt(squares) if math.isfinite(squares) else math.inf
        return StepStats(nll_sum / max(1, tokens), norm, tokens, not finite)

    def _gradient_squares(self) -> float:
        """This rank's summand of the squared global gradient norm; not finite if a gradient is not.

        DeepSpeed looks for infinities in some stages and precisions only, so this is also the
        finite check: one number, which needs no further reduction of its own.
        """
        gradients, replicated = zero.reduced_gradients(self._ds.module, self._wrapped)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        squares = float(torch.stack(norms).double().square().sum()) if norms else 0.0
        return squares / self._mesh.dp if replicated else squares

    @torch.no_grad()
    def score(self, batch: Batch) -> TokenScores:
        """Per-token nll and is-greedy [B, T] of this rank's rows."""
        batch = batch.to(self._mesh.device)
        self._ds.eval()
        return self._ds.module(
            batch.input_ids, batch.targets, batch.unique_ids, batch.inverse, output="scores"
        )

    # ------------------------------------------------------------ state

    def save(self, directory: Path) -> SaveHandle:
        """Every rank writes the boxes it holds; replicas share the writing."""
        save_slices(self._slices(divide_replicas=True), directory)
        return SaveHandle()

    def load(self, directory: Path) -> None:
        """Fills masters and moments from a checkpoint of any layout.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        expected = {
            prefix + name: shape
            for name, shape in self._shapes.items()
            for prefix in (WEIGHTS, *(f"optim.{key}." for key in zero.MOMENTS))
        }
        with self._mesh.together():
            check_tensors(directory, expected)
            self.optimizer_steps = read_state(directory, optimizer_steps=int)["optimizer_steps"]
        load_slices(self._slices(divide_replicas=False), directory)
        zero.set_step(self._adamw, self._shards, self.optimizer_steps)
        zero.masters_to_model(self._wrapped)

    def _slices(self, divide_replicas: bool) -> Iterator[Slice]:
        for shard in self._shards:
            first, last = 0, shard.count
            if shard.replicated and divide_replicas:
                rank, dp = self._mesh.dp_rank, self._mesh.dp
                first, last = shard.count * rank // dp, shard.count * (rank + 1) // dp
            for key, flat in self._tensors(shard).items():
                yield Slice(key + shard.name, shard.shape, shard.start + first, flat[first:last])

    def _tensors(self, shard: zero.Shard) -> dict[str, Tensor]:
        """Checkpoint prefix → flat view of what is held."""
        moments = {f"optim.{k}.": shard.moment(self._adamw, k) for k in zero.MOMENTS}
        return {WEIGHTS: shard.weight, **moments}

    def iter_full_state(self) -> Iterator[ParamState]:
        """Whole fp32 parameters and moments, assembled one parameter at a time."""
        held = {shard.name: shard for shard in self._shards}
        for name, shape in self._shapes.items():
            whole = torch.zeros(3, math.prod(shape), device=self._mesh.device)
            shard = held.get(name)
            if shard is not None:
                for row, flat in zip(whole, self._tensors(shard).values(), strict=True):
                    row[shard.start : shard.start + shard.count] = flat
            if shard is None or not shard.replicated:
                dist.all_reduce(whole)  # the slices do not overlap: adding zeros is exact
            yield ParamState(name, *whole.cpu().view(3, *shape))
