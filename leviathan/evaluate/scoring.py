"""Shared by all evaluations: opens a checkpoint, scores a split, writes the result."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from leviathan.checkpoint.layout import CHECKPOINTS, evaluation_dir, step_of
from leviathan.checkpoint.store import read_model, read_run_config, read_tokenizer, resolve_valid
from leviathan.config.run import DataConfig, ModelConfig
from leviathan.console import progress_bar
from leviathan.data.dataset import Dataset, open_dataset
from leviathan.data.format import DATASET_FILE, DatasetInfo
from leviathan.data.loader import Batch, check_fits, eval_batches
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import DataError
from leviathan.estimate.params import count_params
from leviathan.files import check_writable_dir, write_atomic
from leviathan.hf.llama import (
    check_llama_pair,
    is_llama_folder,
    read_llama_config,
    read_llama_model,
)
from leviathan.hf.tokenizer import read_llama_tokenizer
from leviathan.model.head import IGNORE
from leviathan.model.transformer import CausalLM
from leviathan.parallel.launch_env import limit_threads, read_launch_env
from leviathan.parallel.mesh import Mesh, init_mesh

# ---------------------------------------------------------------- ranks

A = TypeVar("A")
T = TypeVar("T")


class Ranks:
    """The processes that a launcher started, or only this one.

    The batches do not depend on the number of ranks, so results are bitwise identical.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self.rank = 0 if mesh is None else mesh.rank
        self.world_size = 1 if mesh is None else mesh.world_size
        cuda = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device = cuda if mesh is None else mesh.device

    @property
    def all(self) -> range:
        """The numbers of all ranks."""
        return range(self.world_size)

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0; returns its result, or raises its error, on all ranks."""
        if self._mesh is None:
            return work()
        found: T | None = None
        with self._mesh.sync_errors():
            if self.rank == 0:
                found = work()
        return self._mesh.broadcast(found)  # pyright: ignore[reportReturnType]

    def on_each_rank(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank; an error on one rank is raised on all."""
        if self._mesh is None:
            return work()
        found: list[T] = []
        with self._mesh.sync_errors():
            found.append(work())
        return found[0]

    def map(self, work: Callable[[A], T], items: Sequence[A]) -> list[T]:
        """Distributes `work` over the ranks; returns all results in order on every rank.

        `work` must not communicate.
        """
        mine = items[self.rank :: self.world_size]
        done = self.on_each_rank(lambda: [work(item) for item in mine])
        if self._mesh is None:
            return done
        shares = self._mesh.gather(done)
        return [shares[n % self.world_size][n // self.world_size] for n in range(len(items))]

    def stream(self, work: Callable[[A], T], items: Iterable[A]) -> Iterator[tuple[A, T]]:
        """Like `map`, yields (item, result); keeps at most one item per rank in memory."""
        source = iter(items)
        while group := self.on_each_rank(lambda: list(islice(source, self.world_size))):
            yield from zip(group, self.map(work, group), strict=True)


def join_ranks() -> Ranks:
    """Returns the ranks of this launch, or only this process without a launcher.

    Raises:
        ConfigError: the other ranks cannot be reached.
        LocalRankError: the launcher's environment variables are invalid.
    """
    if all(os.environ.get(name, "1") == "1" for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
        return Ranks()  # some systems set RANK everywhere
    env = read_launch_env()
    limit_threads(env)
    return Ranks(init_mesh(env, tp=1))


# ---------------------------------------------------------------- windows

Targets = tuple[Tensor, Tensor, Tensor]  # ids, documents and subsets, [N] each


def windows(count: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    """(first, first scored, end) of windows over `count` targets; each is scored once.

    All but those of the first window are scored after at least `length - stride` others.
    """
    ends = [*range(min(length, count), count, stride), count]
    scored = [0, *ends[:-1]]
    return [(max(0, end - length), start, end) for start, end in zip(scored, ends, strict=True)]


def strided(batches: Iterable[Batch], length: int, stride: int, size: int) -> Iterator[Batch]:
    """The targets of a complete split, in windows `stride` apart.

    Consecutive samples of a dataset form one stream of tokens; if two are not consecutive, a new
    stream starts.

    Args:
        batches: the split in file order, with documents and subsets.
        length: T, inputs of a window.
        stride: targets that a window adds, 1 to T.
        size: windows per batch.

    Yields:
        Batches `[B, T]` like those of `eval_batches`; targets that are not scored are `IGNORE`.
    """
    pending: list[tuple[Tensor, Targets, int]] = []
    number = 0
    for first, (ids, documents, subsets) in _streams(batches):
        inputs = torch.cat([first, ids[:-1]])
        for start, scored, end in windows(len(ids), length, stride):
            part = (ids[start:end], documents[start:end], subsets[start:end])
            pending.append((inputs[start:end], part, scored - start))
            if len(pending) == size:
                yield _batch(pending, number)
                number, pending = number + size, []
    if pending:
        yield _batch(pending, number)


def _streams(batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Targets]]:
    """The first input and all targets of each sequence of consecutive samples."""
    first: Tensor | None = None
    parts: list[Targets] = []
    for batch in batches:
        assert batch.doc_ids is not None
        assert batch.subset_ids is not None
        for row in range(len(batch.targets)):
            counts = batch.targets[row] != IGNORE
            if not counts.any():
                continue
            before = batch.input_ids[row, :1]
            if first is None or not torch.equal(parts[-1][0][-1:], before):
                if first is not None:
                    yield first, _joined(parts)
                first, parts = before, []
            kept = (batch.targets[row], batch.doc_ids[row], batch.subset_ids[row])
            parts.append((kept[0][counts], kept[1][counts], kept[2][counts]))
    if first is not None:
        yield first, _joined(parts)


def _joined(parts: list[Targets]) -> Targets:
    ids, documents, subsets = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, documents, subsets


def _batch(rows: list[tuple[Tensor, Targets, int]], number: int) -> Batch:
    length = max(len(inputs) for inputs, _, _ in rows)
    shape = (len(rows), length)
    inputs = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORE)
    documents, subsets = torch.zeros_like(inputs), torch.full(shape, -1)
    for place, (ids, (next_ids, documents_, subsets_), scored) in enumerate(rows):
        inputs[place, : len(ids)] = ids
        targets[place, scored : len(ids)] = next_ids[scored:]
        documents[place, : len(ids)] = documents_
        subsets[place, scored : len(ids)] = subsets_[scored:]
    distinct, inverse = torch.unique(inputs, return_inverse=True)
    names = tuple(range(number, number + len(rows)))
    return Batch(inputs, targets, distinct, inverse, names, documents, subsets)


# ---------------------------------------------------------------- checkpoints and splits


@dataclass(frozen=True)
class CheckpointDescription:
    """A checkpoint or a Llama directory, without its weights.

    Attributes:
        directory: its path.
        name: name of the run or of the directory.
        model_config: configuration of the model.
        tokenizer: tokenizer used in training.
        step: training step; None for a Llama directory.
        data: training data; None for a Llama directory.
    """

    directory: Path
    name: str
    model_config: ModelConfig
    tokenizer: Tokenizer
    step: int | None
    data: DataConfig | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the model in a result."""
        return {
            "checkpoint": str(self.directory),
            "step": self.step,
            "parameters": asdict(count_params(self.model_config)),
        }

    def result_dir(self) -> Path | None:
        """`run_dir/evaluation/step-XXXXXXXX`; None if the checkpoint is not in a run directory."""
        if self.directory.parent.name != CHECKPOINTS:
            return None
        return evaluation_dir(self.directory.parent.parent, step_of(self.directory))

    def file(self, name: str, result: dict[str, Any]) -> None:
        """Writes `result` as JSON into `result_dir`, if there is one."""
        directory = self.result_dir()
        if directory is not None:
            write_json(directory / name, result)


@dataclass(frozen=True)
class LoadedCheckpoint(CheckpointDescription):
    """A described checkpoint with its model, on every rank."""

    model: CausalLM = field(kw_only=True)
    ranks: Ranks = field(kw_only=True)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.ranks.device

    def file(self, name: str, result: dict[str, Any]) -> None:
        """Like `Described.file`, on rank 0 only."""
        if self.ranks.rank == 0:
            super().file(name, result)


def describe(path: Path, ranks: Ranks | None = None) -> CheckpointDescription:
    """Checks and describes a checkpoint without reading its weights.

    Args:
        path: path accepted by `resolve_checkpoint`, or a Hugging Face Llama directory.
        ranks: ranks that will load it; all use the checkpoint that rank 0 resolved and verified,
            even if a later one is saved in the meantime.

    Raises:
        CheckpointError: missing, incomplete or corrupt.
        DataError: its tokenizer is corrupt, or its run directory is not writable.
    """
    ranks, folder = ranks or Ranks(), Path(path)
    resolved = ranks.on_rank_zero(
        lambda: folder if is_llama_folder(folder) else resolve_valid(folder)
    )
    return ranks.on_each_rank(lambda: _describe(resolved.resolve()))


def _describe(directory: Path) -> CheckpointDescription:
    if is_llama_folder(directory):
        folder = directory
        config = read_llama_config(folder)
        tokenizer = read_llama_tokenizer(folder)
        check_llama_pair(folder, config, tokenizer)
        return CheckpointDescription(folder, folder.name, config, tokenizer, None)
    run = read_run_config(directory)
    step, tokenizer = step_of(directory), read_tokenizer(directory, run)
    found = CheckpointDescription(directory, run.run_dir.name, run.model, tokenizer, step, run.data)
    if (results := found.result_dir()) is not None:
        check_writable_dir(results)
    return found


def open_checkpoint(path: Path, ranks: Ranks | None = None) -> LoadedCheckpoint:
    """Loads a model, onto the GPU if available, and its tokenizer.

    Args:
        path: as for `describe`.
        ranks: ranks that share the work; each loads the full model.

    Raises:
        CheckpointError: missing, incomplete, corrupt, or of another model.
        DataError: as `describe`.
    """
    ranks = ranks or Ranks()
    return load_checkpoint(describe(path, ranks), ranks)


def load_checkpoint(found: CheckpointDescription, ranks: Ranks) -> LoadedCheckpoint:
    """Loads the weights of a described checkpoint, onto the GPU if available.

    Raises:
        CheckpointError: the weights do not match the configuration.
    """

    def read() -> CausalLM:
        if found.step is None:
            return read_llama_model(found.directory, found.model_config)
        return read_model(found.directory)[0]

    model = ranks.on_each_rank(read).to(ranks.device).eval()
    return LoadedCheckpoint(**vars(found), model=model, ranks=ranks)


def open_data(loaded: CheckpointDescription, data: Path, split: str) -> Dataset:
    """Opens a dataset and checks that it matches the model.

    A dataset without `dataset.json` is read with the `data.format` of the run of the model.

    Raises:
        DataError: no such split, or another tokenizer, vocabulary or context length.
    """
    data, own = Path(data), loaded.data
    if own is not None and own.format is not None and not (data / DATASET_FILE).exists():
        # The checkpoint contains the tokenizer, even if the file named by the run is missing.
        form = own.format.model_copy(update={"tokenizer": str(loaded.directory)})
        described = own.model_copy(update={"path": data, "format": form})
        dataset = open_dataset(described, loaded.model_config.seq_len)
    else:
        dataset = open_dataset(data)
    info = dataset.info
    check_fits(info, loaded.model_config, global_batch_size=1)
    if info.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
        raise DataError(
            "evaluate.other_tokenizer",
            f"{data}: the tokenizer ({info.tokenizer.name}) differs from that of the checkpoint "
            f"{loaded.directory} ({loaded.tokenizer.name}); prepare the text again with the "
            "tokenizer of the checkpoint",
        )
    if info.split(split).rows == 0:
        raise DataError(
            "evaluate.empty_split",
            f"{data}: the {split} split is empty; increase `validation` when preparing the dataset",
        )
    return dataset


@dataclass(frozen=True)
class Scored:
    """The scored targets of one batch, flat.

    Attributes:
        nll: nats, [N] float64.
        targets: token ids, [N] int64.
        documents: index of the document of each target, [N] int64.
        subsets: index into `DatasetInfo.subsets`, [N] int64.
    """

    nll: np.ndarray
    targets: np.ndarray
    documents: np.ndarray
    subsets: np.ndarray


def score_split(
    loaded: LoadedCheckpoint,
    data: Dataset,
    split: str,
    batch_size: int,
    title: str,
    stride: int | None = None,
) -> Iterator[Scored]:
    """Scores every target of a split once, in file order; padding is skipped.

    With a `stride`, windows start that many tokens apart. Each
    rank scores its share of the batches and gets all results.

    Raises:
        DataError: the model gives a loss that is not finite.
    """
    rows = data.info.split(split).rows
    batches = eval_batches(data, split, batch_size)
    if stride is not None:
        batches = strided(batches, data.info.seq_len, stride, batch_size)
        rows = -(-rows * data.info.seq_len // stride)

    def losses(batch: Batch) -> np.ndarray:
        there = batch.to(loaded.device)
        scores = loaded.model.score(there.input_ids, there.targets, there.unique_ids, there.inverse)
        nll = scores.nll.double().cpu().numpy()[(batch.targets != IGNORE).numpy()]
        if not np.isfinite(nll).all():
            raise DataError(
                "evaluate.not_finite",
                f"{loaded.directory}: the model's loss is not finite on the {split} split of "
                f"{data.path} (samples {batch.rows}); use an earlier "
                "checkpoint",
            )
        return nll

    with progress_bar(title, total=rows) as bar:
        for batch, nll in loaded.ranks.stream(losses, batches):
            counts = (batch.targets != IGNORE).numpy()
            assert batch.doc_ids is not None
            assert batch.subset_ids is not None
            yield Scored(
                nll,
                batch.targets.numpy()[counts],
                batch.doc_ids.numpy()[counts],
                batch.subset_ids.numpy()[counts],
            )
            bar.advance(sum(row >= 0 for row in batch.rows))


def data_identity(info: DatasetInfo, data: Path, split: str) -> dict[str, Any]:
    """Identifies the data in a result."""
    return {"path": str(data), "fingerprint": info.fingerprint, "split": split}


def write_json(file: Path, result: dict[str, Any]) -> None:
    """Writes a JSON file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(result, indent=1, allow_nan=False).encode())
