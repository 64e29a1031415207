"""What every evaluation shares: open a checkpoint, score a split, file the result."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leviathan.checkpoint.layout import CHECKPOINTS, step_of
from leviathan.checkpoint.load import read_model, read_run_config, whole_checkpoint
from leviathan.config.schema import ModelConfig
from leviathan.console import progress_bar
from leviathan.data.files import check_folder, write_atomic
from leviathan.data.format import DatasetInfo
from leviathan.data.stream import check_fits, eval_batches
from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.errors import CheckpointError, DataError
from leviathan.evaluate.llama_folder import (
    is_llama_folder,
    read_llama_config,
    read_llama_model,
    read_llama_tokenizer,
)
from leviathan.evaluate.strided import strided
from leviathan.model.accounting import account
from leviathan.model.transformer import IGNORE, CausalLM


@dataclass(frozen=True)
class Described:
    """A checkpoint or a Llama folder, all but its weights.

    Attributes:
        directory: where it lies.
        name: of the run, or of the folder.
        model_config: the model's shape.
        tokenizer: the one it was trained with.
        step: optimizer steps behind the weights; None for a Llama folder.
    """

    directory: Path
    name: str
    model_config: ModelConfig
    tokenizer: Tokenizer
    step: int | None

    @property
    def identity(self) -> dict[str, Any]:
        """What a result must say about the model it belongs to."""
        return {
            "checkpoint": str(self.directory),
            "step": self.step,
            "parameters": asdict(account(self.model_config)),
        }

    def result_dir(self) -> Path | None:
        """`run_dir/evaluation/step-XXXXXXXX`; None where the checkpoint lies in no run folder."""
        if self.directory.parent.name != CHECKPOINTS:
            return None
        return self.directory.parent.parent / "evaluation" / self.directory.name

    def file(self, name: str, result: dict[str, Any]) -> None:
        """Writes `result` as JSON into `result_dir`, if there is one."""
        directory = self.result_dir()
        if directory is not None:
            write_json(directory / name, result)


@dataclass(frozen=True)
class Loaded(Described):
    """A trained model with all that belongs to it."""

    model: CausalLM
    device: torch.device


def describe(path: Path) -> Described:
    """What can be said of a checkpoint, and refused, before its weights are read.

    Args:
        path: whatever `resolve_checkpoint` takes, or a Hugging Face Llama folder.

    Raises:
        CheckpointError: missing, incomplete or damaged.
        DataError: its tokenizer is damaged, or its run folder takes no results.
    """
    if is_llama_folder(path):
        folder = Path(path).resolve()
        config = read_llama_config(folder)
        tokenizer = read_llama_tokenizer(folder)
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids, the model "
                f"{config.vocab_size:,}: they do not belong together"
            )
        return Described(folder, folder.name, config, tokenizer, None)
    directory = whole_checkpoint(Path(path)).resolve()
    run = read_run_config(directory)
    step, tokenizer = step_of(directory), load_tokenizer(directory)
    found = Described(directory, run.run_dir.name, run.model, tokenizer, step)
    if (results := found.result_dir()) is not None:
        check_folder(results)
    return found


def open_checkpoint(path: Path) -> Loaded:
    """Loads the model onto the GPU where there is one, and its tokenizer.

    Raises:
        CheckpointError: missing, incomplete, damaged, or of another model.
        DataError: as `describe`.
    """
    return load_described(describe(path))


def load_described(found: Described) -> Loaded:
    """The weights to what `describe` has verified, on the GPU where there is one.

    Raises:
        CheckpointError: of another model than its configuration.
    """
    if found.step is None:
        model = read_llama_model(found.directory, found.model_config)
    else:
        model, _, _ = read_model(found.directory)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Loaded(**vars(found), model=model.to(device).eval(), device=device)


def open_data(loaded: Described, data: Path, split: str) -> DatasetInfo:
    """The data set's description, once it is known that the model can be scored on it.

    Raises:
        DataError: no such split, or another tokenizer, vocabulary or context length.
    """
    info = DatasetInfo.load(Path(data))
    check_fits(info, loaded.model_config, global_batch_size=1)
    if info.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
        raise DataError(
            f"{data}: was made with another tokenizer ({info.tokenizer.name}) than the checkpoint "
            f"{loaded.directory} was trained with ({loaded.tokenizer.name}); prepare the text "
            "again with the checkpoint's own tokenizer"
        )
    if info.split(split).rows == 0:
        raise DataError(f"{data}: its {split} split is empty; give `validation` some documents")
    return info


@dataclass(frozen=True)
class Scored:
    """The scored targets of one batch, flat.

    Attributes:
        nll: nats, [N] float64.
        targets: token ids, [N] int64.
        documents: running number of the document each target belongs to, [N] int64.
        subsets: index into `DatasetInfo.subsets`, [N] int64.
    """

    nll: np.ndarray
    targets: np.ndarray
    documents: np.ndarray
    subsets: np.ndarray


def score_split(
    loaded: Loaded,
    info: DatasetInfo,
    data: Path,
    split: str,
    batch_size: int,
    title: str,
    stride: int | None = None,
) -> Iterator[Scored]:
    """Scores every target of a split once, in file order; padding and filler rows are left out.

    With a `stride` below the context's length, in windows that begin so many tokens apart.

    Raises:
        DataError: the model gives a loss that is not finite.
    """
    rows = info.split(split).rows
    batches = eval_batches(Path(data), split, batch_size, dp_rank=0, dp=1)
    if stride is not None:
        batches = strided(batches, info.seq_len, stride, batch_size)
        rows = -(-rows * info.seq_len // stride)
    with progress_bar(title, total=rows) as bar:
        for batch in batches:
            on_device = batch.to(loaded.device)
            scores = loaded.model.score(
                on_device.input_ids, on_device.targets, on_device.unique_ids, on_device.inverse
            )
            counts = (batch.targets != IGNORE).cpu().numpy()
            nll = scores.nll.double().cpu().numpy()[counts]
            if not np.isfinite(nll).all():
                raise DataError(
                    f"{loaded.directory}: the model's loss is not finite on the {split} split of "
                    f"{data} (rows {batch.rows}); the weights are broken: take an older checkpoint"
                )
            assert batch.doc_ids is not None
            assert batch.subset_ids is not None
            yield Scored(
                nll,
                batch.targets.cpu().numpy()[counts],
                batch.doc_ids.cpu().numpy()[counts],
                batch.subset_ids.cpu().numpy()[counts],
            )
            bar.advance(sum(row >= 0 for row in batch.rows))


def data_identity(info: DatasetInfo, data: Path, split: str) -> dict[str, Any]:
    """What a result must say about the text it was computed on."""
    return {"path": str(data), "fingerprint": info.fingerprint, "split": split}


def write_json(file: Path, result: dict[str, Any]) -> None:
    """Writes one JSON file at once, so that a reader never meets half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(result, indent=1, allow_nan=False).encode())
