"""Builds the dataset from tokenized files: index, shards, counts, tokenizer, `dataset.json`."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.config.explain import did_you_mean
from leviathan.console import progress_bar
from leviathan.data.format import (
    COUNTS_FILE,
    DATASET_FILE,
    FORMAT_VERSION,
    REJECTS_FILE,
    DatasetInfo,
    SourceInfo,
    SplitInfo,
    TokenizerInfo,
    token_dtype,
)
from leviathan.data.mds import read_index
from leviathan.data.prepare.executors import Pool
from leviathan.data.prepare.packing import Selection, StreamIndex, TokenizedFile, index_stream, pack
from leviathan.data.prepare.tokenize import TRAIN, VAL
from leviathan.data.prepare.workdir import WorkDir
from leviathan.data.tokenizer import Tokenizer
from leviathan.errors import DataError
from leviathan.files import write_atomic


@dataclass(frozen=True)
class DatasetSpec:
    """Input of `build_dataset`: tokenized files, selections and description.

    Attributes:
        subsets: names; their indices are the numbers in `Part.subset_of`.
        made_of: JSON that differs if the shards would differ.
        choices: the documents of each split.
        rejects: the content of `rejects.jsonl`, if any.
    """

    tokenizer: Tokenizer
    seq_len: int
    subsets: list[str]
    parts: Sequence[TokenizedFile]
    made_of: Sequence[Any]
    choices: Mapping[str, Selection]
    sources: list[SourceInfo]
    config: dict[str, Any]
    duplicates: int = 0
    rejects: bytes = field(default=b"", repr=False)


class EmptyTrainingSplit(DataError):
    """All documents are held out or in an omitted subset."""


def build_dataset(recipe: DatasetSpec, workdir: WorkDir, pool: Pool) -> DatasetInfo:
    """Writes a dataset; `dataset.json` last.

    Raises:
        EmptyTrainingSplit: the training split would be empty.
    """
    out, tokenizer = workdir.out, recipe.tokenizer
    layouts = _lay_out_all(recipe)
    folders = workdir.packing(recipe.made_of)
    splits: dict[str, SplitInfo] = {}
    total = sum(layout.ids for layout in layouts.values())
    with progress_bar("packing (tokens)", total=total) as bar:
        for name, layout in layouts.items():
            splits[name], counts = pack(
                layout,
                tokenizer,
                recipe.subsets,
                recipe.seq_len,
                folders[name],
                pool,
                bar.advance,
            )
            if name == "train":
                _save_counts(out / COUNTS_FILE, counts)
    for name in layouts:
        folders[name].rename(out / name)
    if recipe.rejects:
        write_atomic(out / REJECTS_FILE, recipe.rejects)
    tokenizer.save(out)
    info = DatasetInfo(
        format_version=FORMAT_VERSION,
        fingerprint=fingerprint(out, tokenizer.fingerprint, recipe.seq_len, recipe.subsets, splits),
        vocab_size=tokenizer.vocab_size,
        seq_len=recipe.seq_len,
        dtype=token_dtype(tokenizer.vocab_size),
        tokenizer=TokenizerInfo(
            name=tokenizer.name,
            fingerprint=tokenizer.fingerprint,
            end_of_text=tokenizer.end_of_text,
        ),
        subsets=recipe.subsets,
        splits=splits,
        documents=sum(split.documents for split in splits.values()),
        empty=sum(source.empty for source in recipe.sources),
        duplicates=recipe.duplicates,
        rejected=sum(source.rejected for source in recipe.sources),
        dropped_tail_tokens=0,  # the last sample is padded, never dropped
        sources=recipe.sources,
        config=recipe.config,
    )
    write_atomic(out / DATASET_FILE, info.dump())
    workdir.close()
    return info


def fingerprint(
    out: Path,
    tokenizer: str,
    seq_len: int,
    subsets: Sequence[str],
    splits: Mapping[str, SplitInfo],
) -> str:
    """SHA-256 over the tokenizer, the sample length, the subsets and every shard's hash."""
    shards = {
        name: [shard.raw_data.hashes.sha256 for shard in read_index(out / name)]
        for name in sorted(splits)
    }
    content = [FORMAT_VERSION, tokenizer, seq_len, list(subsets), shards]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def epochs(mixing: Mapping[str, float], subsets: Sequence[str]) -> np.ndarray | None:
    """Epochs of each subset, float64 [subsets]; None: one of each.

    Raises:
        DataError: `mixing` names a subset that the corpus does not have.
    """
    for name in mixing:
        if name not in subsets:
            hint = did_you_mean(name, subsets, f"it has {', '.join(subsets)}")
            raise DataError(
                "prep.unknown_subset", f"mixing: the corpus has no subset {name!r}; {hint}"
            )
    if not mixing:
        return None
    return np.array([mixing.get(name, 1.0) for name in subsets])


def _lay_out_all(recipe: DatasetSpec) -> dict[str, StreamIndex]:
    total = sum(part.documents for part in recipe.parts)  # each is read once per split
    layouts: dict[str, StreamIndex] = {}
    with progress_bar("indexing (documents)", total=total) as bar:
        for name, choice in recipe.choices.items():
            layout = index_stream(
                recipe.parts,
                choice,
                len(recipe.subsets),
                lambda documents: bar.advance(documents / len(recipe.choices)),
            )
            if layout.documents:
                layouts[name] = layout
            elif choice.split == TRAIN:
                raise EmptyTrainingSplit(
                    "prep.nothing_to_train_on",
                    "no documents are left for training: all of them are held out or omitted. "
                    "Hold out fewer (validation.paths, validation.fraction), raise the weights "
                    "of mixing, or add files to source.paths",
                )
    return layouts


def split_selections(of_training: np.ndarray | None = None) -> dict[str, Selection]:
    """The training split with its weights, and the complete validation split."""
    return {"train": Selection(TRAIN, of_training), "val": Selection(VAL)}


def _save_counts(path: Path, counts: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, counts)
    write_atomic(path, buffer.getvalue())
