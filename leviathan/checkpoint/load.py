"""Loading checkpoints: the latest valid one to resume from, or the model only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from leviathan.checkpoint.dcp import FlatShard, check_tensors, load_shards, stored_shapes
from leviathan.checkpoint.layout import complete_checkpoints, read_state, resolve_checkpoint
from leviathan.checkpoint.manifest import CONFIG, STATE, verify_manifest
from leviathan.config.load import parse_config
from leviathan.config.schema import RunConfig
from leviathan.console import say
from leviathan.data.dataset import open_tokenizer
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import CheckpointError
from leviathan.model.transformer import CausalLM, meta_model
from leviathan.parallel.mesh import Mesh

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = "model."  # prefix of every weight's name in a checkpoint
PREFIXES = (WEIGHTS, *(f"optim.{key}." for key in MOMENTS))  # of every tensor's name
# Keys of an imported checkpoint's state.json.
IMPORTED_KEY = "imported_from"
PREFIX_TOKEN_KEY = "prefix_token"


def latest_valid(run_dir: Path, mesh: Mesh) -> Path | None:
    """The latest valid checkpoint of a run; prints each corrupt one that it skips. Collective.

    Raises:
        CheckpointError: all checkpoints of the run are corrupt.
    """
    candidates = mesh.broadcast(complete_checkpoints(run_dir))
    problems: list[str] = []
    for directory in reversed(candidates):
        try:
            with mesh.sync_errors():
                verify_checkpoint(directory, mesh.rank, mesh.world_size)
        except CheckpointError as error:
            problems.append(str(error))
            say(f"Skipping a corrupt checkpoint: {error}", style="yellow")
            continue
        return directory
    if problems:
        raise CheckpointError(
            "checkpoint.all_corrupt",
            f"{run_dir}: all {len(problems)} checkpoints are corrupt; delete them to restart from "
            "step 0",
        )
    return None


def verify_checkpoint(directory: Path, share: int = 0, shares: int = 1) -> int:
    """Verifies file sizes, hashes and state.json, and that the chunks cover every tensor.

    Args:
        directory: the checkpoint.
        share: index of the part of the files to hash; each rank hashes one part.
        shares: number of parts.

    Returns:
        The number of files that the manifest lists.

    Raises:
        CheckpointError: a file or tensor is missing or corrupt; the message names the first one.
    """
    files = verify_manifest(directory, share, shares)
    read_state(directory, step=int)
    model = meta_model(read_run_config(directory).model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    # An imported model has weights but no optimizer state.
    trained = any(not name.startswith(WEIGHTS) for name in stored_shapes(directory))
    prefixes = PREFIXES if trained else (WEIGHTS,)
    check_tensors(directory, {p + name: shape for name, shape in shapes.items() for p in prefixes})
    return files


def read_run_config(directory: Path) -> RunConfig:
    """Reads the resolved configuration in a checkpoint or run directory.

    Raises:
        CheckpointError: it is missing or unreadable.
    """
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(
            "checkpoint.corrupt", f"{path}: missing: the directory has no run configuration"
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError("checkpoint.corrupt", f"{path}: cannot be read ({error})") from error
    return parse_config(text, RunConfig, str(path))


def read_tokenizer(directory: Path, run: RunConfig) -> Tokenizer:
    """Reads the tokenizer of a checkpoint, with the end-of-text id of its dataset.

    The prefix token of an imported model is the token that its own tokenizer prepends to a text.

    Raises:
        CheckpointError: its state.json is corrupt.
        DataError: the tokenizer is corrupt.
    """
    tokenizer = open_tokenizer(run.data, directory)
    state = read_state(directory) if (directory / STATE).is_file() else {}
    if isinstance(prefix := state.get(PREFIX_TOKEN_KEY), int):
        tokenizer.prefix_token = prefix
    elif IMPORTED_KEY in state:
        say(
            f"warning: {directory} was imported by an earlier version, which did not record the "
            "prefix token and did not compare token ids: import the model again",
            style="yellow",
        )
    return tokenizer


def resolve_valid(path: Path) -> Path:
    """The checkpoint of `resolve_checkpoint`, or the latest valid one before it.

    If the path is a step's directory, that checkpoint must itself be valid.

    Raises:
        CheckpointError: no checkpoint exists, or none is valid.
    """
    newest = resolve_checkpoint(path)
    if newest == Path(path):
        verify_checkpoint(newest)
        return newest
    for directory in reversed(complete_checkpoints(newest.parent.parent)):
        try:
            verify_checkpoint(directory)
        except CheckpointError as error:
            say(f"Skipping a corrupt checkpoint: {error}", style="yellow")
            continue
        return directory
    raise CheckpointError(
        "checkpoint.all_corrupt", f"{path}: all checkpoints in this directory are corrupt"
    )


def load_model(path: Path) -> tuple[CausalLM, RunConfig, dict[str, Any]]:
    """Loads a trained model on the CPU in fp32, in evaluation mode, without optimizer state.

    Args:
        path: any path that `resolve_checkpoint` accepts; for a run, the latest valid checkpoint is
            loaded.

    Returns:
        The model, the run's configuration, and state.json.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or corrupt, or does not match its
            config.yaml.
    """
    return read_model(resolve_valid(path))


def read_model(directory: Path) -> tuple[CausalLM, RunConfig, dict[str, Any]]:
    """`load_model` without verification, for a directory returned by `resolve_valid`."""
    config = read_run_config(directory)
    model = CausalLM(config.model)
    fill_model(model, directory)
    return model.eval(), config, read_state(directory, step=int)


def fill_model(model: CausalLM, directory: Path) -> None:
    """Loads only the weights of a checkpoint into a model on the CPU.

    Raises:
        CheckpointError: it belongs to another model, or a weight is not finite.
    """
    slices = weight_shards(model)
    check_tensors(directory, {piece.key: piece.shape for piece in slices}, WEIGHTS)
    load_shards(slices, directory, collective=False)
    check_finite({piece.key: piece.flat for piece in slices}, str(directory))


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Checks that weights contain no NaN or infinity.

    Raises:
        CheckpointError: a weight is not finite; the message names the tensors.
    """
    counts = {name: int((~t.isfinite()).sum()) for name, t in tensors.items()}
    wrong = [f"{name} ({n:,} of {tensors[name].numel():,})" for name, n in counts.items() if n]
    if wrong:
        more = f" and {len(wrong) - 3} more tensors" if len(wrong) > 3 else ""
        raise CheckpointError(
            "checkpoint.not_finite",
            f"{source}: weights are not finite: {', '.join(wrong[:3])}{more}. Use an earlier "
            "checkpoint",
        )


def weight_shards(model: CausalLM) -> list[FlatShard]:
    """All weights of an unsharded model as slices, with their names in a checkpoint."""
    parameters = ((WEIGHTS + name, p.data) for name, p in model.named_parameters())
    return [FlatShard(key, tuple(p.shape), 0, p.view(-1)) for key, p in parameters]
