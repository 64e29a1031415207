"""Evaluation during training, with the same results as `leviathan perplexity` and `eval`.

It uses the same head, the same harness and the same fp32 weights as the checkpoint of the step.
Evaluation does not change the training: batches depend only on the step, and random states are
restored.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from leviathan.checkpoint.layout import step_dir
from leviathan.config.run import RunConfig
from leviathan.data.dataset import Dataset, open_tokenizer
from leviathan.data.loader import IGNORE, eval_batches
from leviathan.engine.base import Engine
from leviathan.evaluate.scoring import LoadedCheckpoint, Ranks
from leviathan.model.transformer import CausalLM
from leviathan.parallel.mesh import Mesh


@dataclass(frozen=True)
class Validation:
    """Nats per target of the validation split, and of each subset with targets."""

    loss: float
    by_subset: dict[str, float]


def validate(engine: Engine, config: RunConfig, dataset: Dataset, mesh: Mesh) -> Validation:
    """Scores every target of the validation split once. Collective."""
    names = dataset.info.subsets
    nats, targets = np.zeros(len(names)), np.zeros(len(names))
    total = 0.0
    size = config.train.micro_batch_size
    with preserved_rng_state():
        for batch in eval_batches(dataset, "val", size, mesh.dp_rank, mesh.dp):
            nll = engine.score(batch).nll.double().cpu()
            total += float(nll.sum())
            assert batch.subset_ids is not None
            scored = (batch.targets != IGNORE).numpy()
            subsets = batch.subset_ids.numpy()[scored]
            nats += np.bincount(subsets, nll.numpy()[scored], len(names))
            targets += np.bincount(subsets, minlength=len(names))
    total, *sums = mesh.sum(total, *nats.tolist(), *targets.tolist())
    nats, targets = np.array(sums).reshape(2, -1)
    by_subset = {
        name: float(nats[index] / targets[index])
        for index, name in enumerate(names)
        if targets[index]
    }
    return Validation(total / max(1, targets.sum()), by_subset)


def check_tasks(config: RunConfig) -> None:
    """Checks before training that the tasks exist and their files are valid.

    Raises:
        ConfigError: a task is unknown, or reads files without `evaluate.task_data`.
        DataError: a file is missing or corrupt.
    """
    if config.evaluate.tasks:
        from leviathan.evaluate.harness.model import check_tasks as check  # takes seconds to import

        check(config.evaluate.tasks, config.evaluate.task_data)


def run_tasks(engine: Engine, config: RunConfig, mesh: Mesh, step: int) -> dict[str, Any]:
    """Runs `evaluate.tasks` on the current model, with a full copy on every rank. Collective.

    The results of lm-eval are written to `evaluation/step-XXXXXXXX`, as by `leviathan eval`.

    Returns:
        `task/metric` → value.

    Raises:
        ConfigError, DataError: the files of the tasks have changed.
    """
    from leviathan.evaluate.harness.model import score_tasks

    wishes = config.evaluate
    with preserved_rng_state():
        loaded = LoadedCheckpoint(
            directory=step_dir(config.run_dir, step).resolve(),
            name=config.run_dir.name,
            model_config=config.model,
            tokenizer=open_tokenizer(config.data),
            step=step,
            data=config.data,
            model=full_model(engine, config).to(mesh.device).eval(),
            ranks=Ranks(mesh if mesh.world_size > 1 else None),
        )
        result, _ = score_tasks(
            loaded, wishes.tasks, wishes.task_data, wishes.limit, wishes.batch_size
        )
    return {
        f"{task}/{name.removesuffix(',none')}": value
        for task, figures in result["results"].items()
        for name, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def full_model(engine: Engine, config: RunConfig) -> CausalLM:
    """Gathers a full copy of the model on the CPU from the shards of all ranks. Collective."""
    model = CausalLM(config.model)
    for state in engine.iter_full_state():
        model.get_parameter(state.name).data.copy_(state.weight)
    return model


@contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Restores the random states at the end of the block."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
