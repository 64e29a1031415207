"""Saves, keeps and loads checkpoints. A checkpoint is either complete or does not exist."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from leviathan.checkpoint.dcp import FlatShard, check_tensors, load_shards, stored_shapes
from leviathan.checkpoint.layout import (
    CONFIG,
    SAVING,
    STATE,
    complete_checkpoints,
    file_names,
    fingerprint,
    prune,
    quarantine,
    read_state,
    resolve_checkpoint,
    staging_dir,
    step_dir,
    step_of,
    superseded,
    verify_manifest,
    write_json,
    write_manifest,
)
from leviathan.config.identity import flatten
from leviathan.config.load import dump_config, parse_config
from leviathan.config.run import CheckpointConfig, ModelConfig, RunConfig
from leviathan.console import say
from leviathan.data.dataset import open_tokenizer, save_tokenizer, tokenizer_bytes
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import CheckpointError, ConfigError
from leviathan.estimate.params import count_params
from leviathan.formatting import format_bytes
from leviathan.model.transformer import CausalLM, meta_model
from leviathan.parallel.mesh import Mesh

# ---------------------------------------------------------------- background saves


class SaveFuture:
    """Handle of a save that starts on construction, in a background thread or synchronously.

    The thread ends with the process: an unfinished save leaves a staging directory, which the next
    start removes.

    Args:
        work: function to run; the same on all ranks, because it may communicate.
        background: whether to run it in a thread and return immediately.
    """

    def __init__(self, work: Callable[[], None], background: bool) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
            self._thread.start()
        else:
            work()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """True once the save has failed; `wait` raises its error."""
        return self._error is not None

    def wait(self) -> None:
        """Blocks until the save is complete, and raises its error if it failed."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


# ---------------------------------------------------------------- retention
# The single definition of all three: saving deletes checkpoints by the same rule
# (`layout.superseded`), and `leviathan check` and the trainer compare the same numbers with the
# free space.

STATES = 3  # tensors per parameter: the fp32 weight and AdamW's two moments
BYTES = 4  # per fp32 value
# Overhead of DCP per stored chunk (archive of torch.save, metadata entry).
PIECE_BYTES = 1_577 + 275
RANGE_PIECES = 6  # additional chunks at the two ends of a flat range
FILE_BYTES = 150  # manifest entry per file
SMALL_FILES = 4_000  # bytes of configuration, state, manifest and metadata


@dataclass(frozen=True)
class Retention:
    """What a run saves and keeps.

    Attributes:
        bytes_each: bytes of one checkpoint.
        saves: number of scheduled saves, from step 0 to the last step.
        kept: steps whose checkpoints remain when the run is complete.
        at_once: maximum number of complete checkpoints on disk, including the latest one before
            older ones are deleted.
        more: maximum number of additional checkpoints on disk if the run resumes now.
    """

    bytes_each: int
    saves: int
    kept: tuple[int, ...]
    at_once: int
    more: int

    @property
    def bytes_needed(self) -> int:
        """Free bytes that the remaining steps need."""
        return self.more * self.bytes_each


def retention(config: RunConfig, world_size: int = 1) -> Retention:
    """What a run saves and keeps, in total and beyond the checkpoints that it has."""
    saves = scheduled_saves(config)
    kept, at_once = _simulate([], saves, config.checkpoint)
    there = [step_of(path) for path in complete_checkpoints(config.run_dir)]
    later = [step for step in saves if not there or step > there[-1]]
    _, most = _simulate(there, later, config.checkpoint)
    size = checkpoint_bytes(config, world_size)
    return Retention(size, len(saves), tuple(kept), at_once, most - len(there))


def scheduled_saves(config: RunConfig) -> list[int]:
    """The steps after which a run saves, including the last step."""
    every, steps = config.checkpoint.every, config.train.steps
    saves = list(range(every, steps + 1, every)) if every else []
    return saves if saves and saves[-1] == steps else [*saves, steps]


def _simulate(
    there: Sequence[int], saves: Sequence[int], keep: CheckpointConfig
) -> tuple[list[int], int]:
    """The steps on disk after all saves, and the maximum number of steps on disk."""
    marked: list[int] = []  # kept permanently, and older than the last `keep_last`
    recent, most = list(there), len(there)
    for step in saves:
        recent.append(step)
        most = max(most, len(marked) + len(recent))
        gone = set(superseded(recent, keep))
        marked += [old for old in recent[: -keep.keep_last] if old not in gone]
        recent = recent[-keep.keep_last :]
    return marked + recent, most


def checkpoint_bytes(config: RunConfig, world_size: int = 1) -> int:
    """Bytes of one checkpoint: tensors, DCP's overhead per chunk, tokenizer and small files."""
    tensors = sum(1 for _ in meta_model(config.model).parameters())
    engine = config.engine
    if engine.kind == "fsdp2":  # every rank of a replica holds a part of every tensor
        pieces = tensors * max(1, world_size // engine.dp_replicate)
    elif engine.zero_stage == 3:
        pieces = tensors * world_size
    else:  # every rank has a flat range that starts and ends inside a tensor
        pieces = tensors * config.parallel.tp + RANGE_PIECES * (world_size - 1)
    return (
        STATES * (BYTES * count_params(config.model).total + pieces * PIECE_BYTES)
        + tokenizer_bytes(config.data)
        + world_size * FILE_BYTES
        + SMALL_FILES
    )


# ---------------------------------------------------------------- saving


def save_checkpoint(
    config: RunConfig,
    mesh: Mesh,
    state: dict[str, Any],
    write_tensors: Callable[[Path], SaveFuture],
) -> SaveFuture:
    """Writes run_dir/checkpoints/step-XXXXXXXX, where `state["step"]` is the step. Collective.

    All files are written to a staging directory: tensors by every rank, then state, configuration
    and tokenizer, then the manifest; then the directory is renamed. Only one save may run at a
    time: wait for the previous one first.

    Args:
        config: run configuration, which is copied into the checkpoint. With
            `checkpoint.async_save` the save is asynchronous.
        mesh: the process mesh.
        state: content of state.json.
        write_tensors: collective; starts writing weights and moments into a directory.

    Returns:
        The handle to wait for.

    Raises:
        CheckpointError: the disk is full or a file cannot be written; raised here or by the
            handle. Older checkpoints are unchanged.
    """
    final = step_dir(config.run_dir, state["step"])
    draft = staging_dir(config.run_dir, state["step"])
    with _discarded_on_error(draft, mesh):
        _make_staging(draft, mesh)
        tensors = write_tensors(draft)

    def finish() -> None:
        with _discarded_on_error(draft, mesh):
            tensors.wait()
            _finish(draft, final, config, mesh.checkpoint_group, state)

    return SaveFuture(finish, config.checkpoint.async_save)


def try_saving(run_dir: Path, mesh: Mesh, write_tensors: Callable[[Path], SaveFuture]) -> None:
    """Writes the tensors of a checkpoint and deletes them, as a test before training. Collective.

    Raises:
        CheckpointError: the tensors cannot be written.
    """
    draft = staging_dir(run_dir, 0)
    with _discarded_on_error(draft, mesh):
        _make_staging(draft, mesh)
        write_tensors(draft).wait()
    if mesh.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # not empty
            draft.parent.rmdir()


def _make_staging(draft: Path, mesh: Mesh) -> None:
    with mesh.sync_errors():
        if mesh.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)


def _finish(draft: Path, final: Path, config: RunConfig, mesh: Mesh, state: dict[str, Any]) -> None:
    """Writes all other files and the manifest, and renames the staging directory."""
    with mesh.sync_errors():
        if mesh.rank == 0:
            _write_small_files(draft, config, state)
    with mesh.sync_errors():
        entries = fingerprint(draft, file_names(draft)[mesh.rank :: mesh.world_size])
    shares = mesh.gather(entries)
    with mesh.sync_errors():
        if mesh.rank == 0:
            write_manifest(draft, {k: v for share in shares for k, v in sorted(share.items())})
            commit(draft, final)
            prune(config.run_dir, config.checkpoint, state["step"])


@contextmanager
def _discarded_on_error(draft: Path, mesh: Mesh) -> Iterator[None]:
    """On an error, deletes the staging directory and raises one CheckpointError."""
    try:
        yield
    except Exception as error:
        if mesh.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        final = draft.with_name(draft.name.removeprefix(SAVING))
        raise CheckpointError(
            "checkpoint.save_failed",
            f"{final}: could not be saved ({error}); earlier checkpoints are unchanged "
            f"({format_bytes(shutil.disk_usage(final.parent.parent).free)} free on this disk)",
        ) from error


def _write_small_files(draft: Path, config: RunConfig, state: dict[str, Any]) -> None:
    write_json(draft / STATE, state)
    (draft / CONFIG).write_text(dump_config(config))
    save_tokenizer(config.data, draft)


def commit(draft: Path, final: Path) -> None:
    """Renames a staging directory to a checkpoint; an existing directory is renamed first."""
    if final.exists():
        # The run directory is locked, so this directory was created from outside during the run.
        quarantine(final)
    draft.rename(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ---------------------------------------------------------------- loading

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


# ---------------------------------------------------------------- initial weights
# Equal shapes are not sufficient: with another number of heads, RoPE base or tokenizer, all shapes
# are the same, but the model computes another function.

# Keys of `model` that do not change what weights compute: initial values, lengths and layouts.
_INDEPENDENT = frozenset(
    {"seq_len", "init_std", "embedding.embedding_init_std", "embedding.spline_init_std"}
    | {"embedding.tp_mode", "embedding.target_params"}
)
# Keys that users change on purpose, for example for a longer context. All other keys are refused.
_ADJUSTABLE = frozenset({"rope_theta", "norm_eps", "vocab_size"})


def check_init_from(config: RunConfig, source: Path) -> list[str]:
    """Compares the model and tokenizer of a run with those of its initial checkpoint.

    Args:
        config: a run with `init_from`.
        source: the checkpoint's directory.

    Returns:
        Warnings: allowed differences, with both values.

    Raises:
        ConfigError: the weights would compute another function, or the ids are other tokens.
        CheckpointError: the checkpoint is corrupt.
    """
    former = read_run_config(source)
    refused, adjusted = _differences(config.model, former.model)
    if refused:
        raise ConfigError(
            "init_from.other_model",
            f"init_from={config.init_from}: {source} has another model:\n  "
            + "\n  ".join(refused)
            + "\nSet these keys as in the checkpoint, or remove init_from.",
        )
    model = meta_model(config.model)
    weights = {WEIGHTS + name: tuple(p.shape) for name, p in model.named_parameters()}
    check_tensors(source, weights, WEIGHTS)
    theirs, ours = read_tokenizer(source, former), open_tokenizer(config.data)
    if theirs.ranks != ours.ranks:
        raise ConfigError(
            "init_from.other_tokenizer",
            f"init_from={config.init_from}: {source} was trained with the tokenizer {theirs.name}, "
            f"but the dataset uses {ours.name}: the ids differ in meaning. Prepare the dataset "
            "with the checkpoint's tokenizer, or remove init_from.",
        )
    if theirs.fingerprint != ours.fingerprint:
        adjusted.append(
            f"tokenizer {theirs.name} (fingerprint {theirs.fingerprint[:12]}) in the checkpoint, "
            f"{ours.name} ({ours.fingerprint[:12]}) in the dataset: same merges, different split "
            "pattern or special tokens"
        )
    if theirs.end_of_text != ours.end_of_text:
        adjusted.append(
            f"end-of-text id {theirs.end_of_text} in the checkpoint, {ours.end_of_text} in the "
            "dataset"
        )
    return adjusted


def warn_of(source: Path, differences: list[str]) -> None:
    """Prints the warnings of `check_init_from`."""
    for difference in differences:
        say(f"warning: init_from {source}: {difference}", style="yellow")


def _differences(model: ModelConfig, former: ModelConfig) -> tuple[list[str], list[str]]:
    """Keys that differ, with both values: those to refuse and those to warn about."""
    here, there = flatten(model.model_dump(mode="json")), flatten(former.model_dump(mode="json"))
    if here["embedding.kind"] != there["embedding.kind"]:
        kinds = (there["embedding.kind"], here["embedding.kind"])
        return [f"model.embedding.kind: {kinds[0]} in the checkpoint, {kinds[1]} here"], []
    independent = _INDEPENDENT
    if here["embedding.kind"] == "binary_codes":
        independent -= {"embedding.embedding_init_std"}  # here a constant of the forward pass
    refused: list[str] = []
    adjusted: list[str] = []
    for key, value in here.items():
        if value != there[key] and key not in independent:
            line = f"model.{key}: {there[key]} in the checkpoint, {value} here"
            (adjusted if key in _ADJUSTABLE else refused).append(line)
    return refused, adjusted
