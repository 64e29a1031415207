"""The materialized input table of a checkpoint, with its tokenizer and token counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leviathan.checkpoint.store import read_run_config
from leviathan.data.format import COUNTS_FILE
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import ConfigError, DataError
from leviathan.evaluate.frequency import read_counts, token_counts
from leviathan.evaluate.scoring import (
    CheckpointDescription,
    Ranks,
    describe,
    load_checkpoint,
    open_data,
)


@dataclass(frozen=True)
class CheckpointTable:
    """An input table and where it comes from.

    Attributes:
        label: the kind, or kind and run if kinds are not unique.
        identity: checkpoint, step and parameters.
        tokenizer: tokenizer of the ids.
        values: [V, D] fp32, without vocabulary padding.
        counts: occurrences of every id in the training split, [V]; None if not available.
    """

    label: str
    identity: dict[str, Any]
    tokenizer: Tokenizer
    values: np.ndarray
    counts: np.ndarray | None

    def text(self, id: int) -> str:
        """The text of an id; bytes that are not valid text are shown as `\\x9b`."""
        if id == self.tokenizer.end_of_text:
            return "<|endoftext|>"
        return self.tokenizer.decode_bytes(id).decode(errors="backslashreplace")


def read_tables(paths: Sequence[Path], data: Path | None = None) -> list[CheckpointTable]:
    """Reads the input tables of checkpoints; all are checked before the first is read.

    Args:
        paths: paths accepted by `describe`.
        data: dataset of the token counts; by default, the training dataset of each run.

    Raises:
        CheckpointError: no valid checkpoint was found.
        DataError: another vocabulary, or `data` is corrupt.
    """
    described = [describe(path) for path in paths]
    first = described[0].tokenizer
    for found in described[1:]:
        if found.tokenizer.fingerprint != first.fingerprint:
            raise DataError(
                "inspect.other_tokenizer",
                f"{found.directory} and {described[0].directory} have different tokenizers, so "
                "their ids are different tokens; inspect them separately",
            )
    return [
        _read(found, label, _counts(found, data))
        for found, label in zip(described, _labels(described), strict=True)
    ]


def token_ids(tokenizer: Tokenizer, tokens: str) -> list[int]:
    """Parses a comma-separated list of tokens, each given as text or as `#` and an id.

    Raises:
        ConfigError: a text is not a single token, or an id is out of range.
    """
    ids, faults = [], []
    for part in tokens.split(",") if tokens else []:
        if part.startswith("#") and part[1:].isdecimal():
            ids.append(int(part[1:]))
            if ids[-1] >= tokenizer.vocab_size:
                faults.append(f"{part}: expected an id from 0 to {tokenizer.vocab_size - 1:,}")
            continue
        found = tokenizer.encode(part)
        if len(found) != 1:
            pieces = " ".join(f"{tokenizer.decode([i])!r} (#{i})" for i in found)
            faults.append(f"{part!r} is {len(found)} tokens: {pieces or 'none'}; give one of them")
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
    """Counts of `data`, or of the training dataset if it still exists and matches."""
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
