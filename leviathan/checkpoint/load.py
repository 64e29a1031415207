"""Reading checkpoints back: the newest whole one to resume from, or a model alone."""

from pathlib import Path
from typing import Any

from torch import Tensor

from leviathan.checkpoint.boxes import Slice, check_tensors, load_slices
from leviathan.checkpoint.layout import (
    CONFIG,
    complete_checkpoints,
    read_state,
    resolve_checkpoint,
)
from leviathan.checkpoint.manifest import verify_manifest
from leviathan.config.load import parse_config
from leviathan.config.schema import RunConfig
from leviathan.console import say
from leviathan.errors import CheckpointError
from leviathan.model.transformer import CausalLM
from leviathan.parallel.mesh import Mesh

WEIGHTS = "model."  # prefix of every weight's name in a checkpoint


def newest_whole(run_dir: Path, mesh: Mesh) -> Path | None:
    """The newest undamaged checkpoint of a run; names each damaged one it passes over. Collective.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    candidates = mesh.broadcast(complete_checkpoints(run_dir))
    damaged: list[str] = []
    for directory in reversed(candidates):
        try:
            with mesh.together():
                verify_manifest(directory, mesh.rank, mesh.world_size)
                read_state(directory)
        except CheckpointError as error:
            damaged.append(str(error))
            say(f"Skipping a damaged checkpoint: {error}", style="yellow")
            continue
        return directory
    if damaged:
        raise CheckpointError(
            f"{run_dir}: none of its {len(damaged)} checkpoints is whole; remove them to start anew"
        )
    return None


def read_run_config(directory: Path) -> RunConfig:
    """The resolved configuration inside a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: missing: not a checkpoint of this program")
    return parse_config(path.read_text(), RunConfig, str(path))


def load_model(path: Path) -> tuple[CausalLM, RunConfig, dict[str, Any]]:
    """A trained model on the CPU in fp32, weights only, in evaluation mode.

    Args:
        path: whatever `resolve_checkpoint` takes.

    Returns:
        The model, the run's configuration, and state.json.

    Raises:
        CheckpointError: missing, incomplete, damaged, or of another model than its config.yaml.
    """
    directory = resolve_checkpoint(path)
    verify_manifest(directory)
    config = read_run_config(directory)
    model = CausalLM(config.model)
    weights: dict[str, Tensor] = {
        WEIGHTS + name: parameter.data for name, parameter in model.named_parameters()
    }
    check_tensors(directory, {key: tuple(w.shape) for key, w in weights.items()}, WEIGHTS)
    slices = [Slice(key, tuple(w.shape), 0, w.view(-1)) for key, w in weights.items()]
    load_slices(slices, directory, collective=False)
    return model.eval(), config, read_state(directory)
