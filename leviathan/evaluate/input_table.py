"""The input table of a checkpoint, materialized, with what is needed to read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leviathan.checkpoint.load import read_run_config
from leviathan.data.format import COUNTS_FILE
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import ConfigError, DataError
from leviathan.evaluate.frequency import read_counts, token_counts
from leviathan.evaluate.ranks import Ranks
from leviathan.evaluate.scoring import CheckpointDescription, describe, load_checkpoint, open_data


@dataclass(frozen=True)
class CheckpointTable:
    """An input table and where it comes from.

    Attributes:
        label: the kind, or kind and run where that says more.
        identity: checkpoint, step and parameters.
        tokenizer: whose ids the rows are.
        values: [V, D] fp32, the tokenizer's ids only (padding rows are cut).
        counts: occurrences of every id in the training split, [V]; None where it is gone.
    """

    label: str
    identity: dict[str, Any]
    tokenizer: Tokenizer
    values: np.ndarray
    counts: np.ndarray | None

    def text(self, id: int) -> str:
        """An id as people read it: its text, bytes that are no text as `\\x9b`."""
        if id == self.tokenizer.end_of_text:
            return "<|endoftext|>"
        return self.tokenizer.decode_bytes(id).decode(errors="backslashreplace")


def read_tables(paths: Sequence[Path], data: Path | None = None) -> list[CheckpointTable]:
    """The input tables of some checkpoints; all are looked at before the first is read.

    Args:
        paths: whatever the evaluations take.
        data: the dataset whose counts to use; omitted, the one a run was trained on.

    Raises:
        CheckpointError: no valid checkpoint there.
        DataError: another vocabulary, or `data` is damaged.
    """
    described = [describe(path) for path in paths]
    first = described[0].tokenizer
    for found in described[1:]:
        if found.tokenizer.fingerprint != first.fingerprint:
            raise DataError(
                "inspect.other_tokenizer",
                f"{found.directory} has another tokenizer than {described[0].directory}: their "
                "rows are different tokens; inspect them one by one",
            )
    return [
        _read(found, label, _counts(found, data))
        for found, label in zip(described, _labels(described), strict=True)
    ]


def token_ids(tokenizer: Tokenizer, asked: str) -> list[int]:
    """Ids of a comma-separated list: the text of one token each, or `#` and an id.

    Raises:
        ConfigError: a text is several tokens, or an id is none; all faults at once.
    """
    ids, faults = [], []
    for part in asked.split(",") if asked else []:
        if part.startswith("#") and part[1:].isdecimal():
            ids.append(int(part[1:]))
            if ids[-1] >= tokenizer.vocab_size:
                faults.append(f"{part}: ids go from 0 to {tokenizer.vocab_size - 1:,}")
            continue
        found = tokenizer.encode(part)
        if len(found) != 1:
            pieces = " ".join(f"{tokenizer.decode([i])!r} (#{i})" for i in found)
            faults.append(f"{part!r} is {len(found)} tokens: {pieces or 'none'}; name one of them")
            continue
        ids += found
    if faults:
        raise ConfigError("inspect.unknown_token", "--tokens: " + "\n--tokens: ".join(faults))
    return ids


def _read(found: CheckpointDescription, label: str, counts: np.ndarray | None) -> CheckpointTable:
    loaded = load_checkpoint(found, Ranks())
    with torch.no_grad():
        table = loaded.model.model.embed_tokens.materialize(dtype=torch.float32)
    values = table[: found.tokenizer.vocab_size].cpu().numpy()
    return CheckpointTable(label, found.identity, found.tokenizer, values, counts)


def _counts(found: CheckpointDescription, data: Path | None) -> np.ndarray | None:
    """Of the dataset named, or of the run's own where it is still there and still the same."""
    if data is not None:
        return token_counts(found, open_data(found, data, "train"), Ranks())
    if found.step is None:
        return None
    own = read_run_config(found.directory).data.path / COUNTS_FILE
    if not own.exists():
        return None
    try:
        return read_counts(own, found.tokenizer.vocab_size)
    except DataError:
        return None


def _labels(described: Sequence[CheckpointDescription]) -> list[str]:
    kinds = [found.model_config.embedding.kind for found in described]
    if len(set(kinds)) == len(kinds):
        return kinds
    return [
        f"{kind} {found.name}" if found.step is None else f"{kind} {found.name} {found.step:,}"
        for kind, found in zip(kinds, described, strict=True)
    ]
