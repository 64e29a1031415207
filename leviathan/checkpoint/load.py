"""Reading checkpoints back: the newest whole one to resume from, or a model alone."""

from pathlib import Path
from typing import Any

from torch import Tensor

from leviathan.checkpoint.boxes import Slice, check_tensors, load_slices
from leviathan.checkpoint.layout import complete_checkpoints, read_state, resolve_checkpoint
from leviathan.checkpoint.manifest import CONFIG, STATE, verify_manifest
from leviathan.config.load import parse_config
from leviathan.config.schema import RunConfig
from leviathan.console import say
from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.errors import CheckpointError
from leviathan.model.transformer import CausalLM
from leviathan.parallel.mesh import Mesh

WEIGHTS = "model."  # prefix of every weight's name in a checkpoint
# Keys of an imported checkpoint's state.json.
IMPORTED = "imported_from"
PREFIX = "prefix_token"


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
                read_state(directory, step=int)
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
        raise CheckpointError(f"{path}: missing: nothing says which run this is")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: unreadable ({error})") from error
    return parse_config(text, RunConfig, str(path))


def data_tokenizer(spec: str | Path, run: RunConfig) -> Tokenizer:
    """The tokenizer of a run's data, with the end-of-text id that its dataset had.

    Raises:
        DataError: damaged.
    """
    tokenizer = load_tokenizer(spec)
    if run.data.format is not None and run.data.format.end_of_text is not None:
        tokenizer.end_of_text = run.data.format.end_of_text
    return tokenizer


def read_tokenizer(directory: Path, run: RunConfig) -> Tokenizer:
    """The tokenizer of a checkpoint: `data_tokenizer`, and what an import recorded.

    The prefix token of an imported model is the one its own program scores with; see `PREFIX`.

    Raises:
        CheckpointError: its state.json is damaged.
        DataError: the tokenizer is damaged.
    """
    tokenizer = data_tokenizer(directory, run)
    state = read_state(directory) if (directory / STATE).is_file() else {}
    if isinstance(prefix := state.get(PREFIX), int):
        tokenizer.prefix_token = prefix
    elif IMPORTED in state:
        say(
            f"warning: {directory} was imported by an earlier version, which did not record the "
            "prefix token and did not compare token ids: import the folder again",
            style="yellow",
        )
    return tokenizer


def whole_checkpoint(path: Path) -> Path:
    """The checkpoint that `resolve_checkpoint` means, or the newest undamaged one before it.

    A step's folder, being named, is the one that is wanted: it must itself be whole.

    Raises:
        CheckpointError: missing or damaged.
    """
    newest = resolve_checkpoint(path)
    if newest == Path(path):
        verify_manifest(newest)
        return newest
    for directory in reversed(complete_checkpoints(newest.parent.parent)):
        try:
            verify_manifest(directory)
        except CheckpointError as error:
            say(f"Skipping a damaged checkpoint: {error}", style="yellow")
            continue
        return directory
    raise CheckpointError(f"{path}: every checkpoint in it is damaged")


def load_model(path: Path) -> tuple[CausalLM, RunConfig, dict[str, Any]]:
    """A trained model on the CPU in fp32, weights only, in evaluation mode.

    Args:
        path: whatever `resolve_checkpoint` takes; of a run, the newest whole checkpoint.

    Returns:
        The model, the run's configuration, and state.json.

    Raises:
        CheckpointError: missing, incomplete, damaged, or of another model than its config.yaml.
    """
    return read_model(whole_checkpoint(path))


def read_model(directory: Path) -> tuple[CausalLM, RunConfig, dict[str, Any]]:
    """`load_model` of a folder that `whole_checkpoint` gave, which is not verified again."""
    config = read_run_config(directory)
    model = CausalLM(config.model)
    fill_model(model, directory)
    return model.eval(), config, read_state(directory, step=int)


def fill_model(model: CausalLM, directory: Path) -> None:
    """Sets the weights of a model on the CPU to a checkpoint's; nothing else of it is read.

    Raises:
        CheckpointError: it is another model's.
    """
    weights: dict[str, Tensor] = {
        WEIGHTS + name: parameter.data for name, parameter in model.named_parameters()
    }
    check_tensors(directory, {key: tuple(w.shape) for key, w in weights.items()}, WEIGHTS)
    slices = [Slice(key, tuple(w.shape), 0, w.view(-1)) for key, w in weights.items()]
    load_slices(slices, directory, collective=False)
