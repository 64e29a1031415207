"""What a prepared dataset looks like on disk.

    dataset.json            everything below, written last: a folder without it is no dataset
    train/ val/             MDS shards of rows, each with its index.json
    token_counts.npy        int64 [vocab_size]: how often each id occurs in the training split
    tokenizer.tiktoken, tokenizer.meta.json
    rejects.jsonl           quarantined lines, if there were any

A split is one long stream of ids: every document's, each followed by the end-of-text id. Row i
holds the `seq_len + 1` ids from `i * seq_len` on, so neighbors overlap by one and every id but the
stream's first is a target exactly once. The last row is padded with end-of-text, which `n_valid`
tells apart. Columns of a row:

    tokens          uint16 or uint32 [seq_len + 1]
    n_valid         int: how many leading ids are real; targets beyond them are padding
    first_document  int: running number, within the split, of the document that holds the first id
    subsets         uint16: subset number of each document in the row, in order
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leviathan.errors import DataError

FORMAT_VERSION = 1
DATASET_FILE = "dataset.json"
COUNTS_FILE = "token_counts.npy"
REJECTS_FILE = "rejects.jsonl"
SLICE_MARK = "slice-{rank}-of-{world}"  # in the work folder: that slice is done
WORK_FOLDER = ".prep"  # present while a preparation is unfinished


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest of the two dtypes that holds every id below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TokenizerInfo(_Record):
    """Which tokenizer the ids are of."""

    name: str
    fingerprint: str
    end_of_text: Count


class SubsetSize(_Record):
    """What a split holds of one subset, copies and end-of-text ids included."""

    documents: Count
    ids: Count


class SplitInfo(_Record):
    """Size of one split.

    Attributes:
        ids: length of the stream, end-of-text ids included.
        tokens: targets, that is every id but the stream's first.
        padded: padding ids in the last row.
        bytes_of_text: UTF-8 bytes of the documents.
        subsets: what of it is of which subset, those it has nothing of omitted.
    """

    rows: Count
    ids: Count
    tokens: Count
    padded: Count
    documents: Count
    bytes_of_text: Count
    subsets: dict[str, SubsetSize] = {}


class SourceInfo(_Record):
    """One source as it was read; `split` is train, val, or hash where content decided.

    `excluded` documents were omitted by their subset; a source with a backend mismatch was encoded
    by tiktoken, because the ids that a faster encoder gave one of its documents were not the same.
    """

    path: str
    bytes: Count
    sha256: str
    documents: Count
    empty: Count
    rejected: Count
    split: Literal["train", "val", "hash"]
    excluded: Count = 0
    backend_mismatches: Count = 0


class DatasetInfo(_Record):
    """`dataset.json`: what a dataset holds and what it was made of.

    `fingerprint` covers the ids and their order, not where or how they were made; it seeds the
    order of training. `config` omits what changes no byte: `out`, `workers`, `executor`.
    With `mixing`, the documents and ids of the splits count copies, those of `sources` do not.
    """

    format_version: int
    fingerprint: str
    vocab_size: int = Field(gt=0)
    seq_len: int = Field(gt=0)
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerInfo
    subsets: list[str] = Field(min_length=1)
    splits: dict[str, SplitInfo]
    documents: Count
    empty: Count
    duplicates: Count
    rejected: Count
    dropped_tail_tokens: Count
    sources: list[SourceInfo]
    config: dict[str, Any]

    @model_validator(mode="after")
    def _is_of_one_piece(self) -> "DatasetInfo":
        if self.dtype != token_dtype(self.vocab_size):
            raise ValueError(f"dtype {self.dtype} is not that of {self.vocab_size} ids")
        if self.tokenizer.end_of_text >= self.vocab_size:
            raise ValueError(f"end_of_text is beyond the {self.vocab_size} ids")
        if not {"train"} <= set(self.splits) <= {"train", "val"}:
            raise ValueError("splits are train and val, of which train is never missing")
        for name, split in self.splits.items():
            targets = max(0, split.ids - 1)
            if (split.tokens, split.padded) != (targets, split.rows * self.seq_len - targets):
                raise ValueError(f"splits.{name}: rows, ids, tokens and padded contradict")
        for name, split in self.splits.items():
            sizes = split.subsets.values()
            summed = (sum(size.documents for size in sizes), sum(size.ids for size in sizes))
            if sizes and summed != (split.documents, split.ids):
                raise ValueError(f"splits.{name}: documents or ids are not the sum of its subsets")
            if not set(split.subsets) <= set(self.subsets):
                raise ValueError(f"splits.{name} names subsets that are not in subsets")
        if self.documents != sum(split.documents for split in self.splits.values()):
            raise ValueError("documents is not the sum over the splits")
        return self

    @classmethod
    def load(cls, directory: Path) -> "DatasetInfo":
        """Reads `directory/dataset.json`.

        Raises:
            DataError: there is none, it is unfinished or damaged, a newer program wrote it, or the
                tokenizer beside it is another one.
        """
        path = directory / DATASET_FILE
        try:
            content = json.loads(path.read_bytes())
            version = content["format_version"]
        except (FileNotFoundError, NotADirectoryError):
            raise DataError("dataset.not_found", _why_missing(directory)) from None
        except OSError as error:
            raise DataError(
                "dataset.unreadable", f"{path} cannot be read: {error.strerror}"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                "dataset.corrupt", f"{path} is damaged ({error}): prepare the dataset again"
            ) from None
        if version != FORMAT_VERSION:
            raise DataError(
                "dataset.other_version",
                f"{path}: format version {version}, this program reads {FORMAT_VERSION}",
            )
        try:
            info = cls.model_validate(content)
            _check_tokenizer(directory, info)
            return info
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            problem = f"{where}: {first['msg']}".removeprefix(": ")
            raise DataError(
                "dataset.corrupt", f"{path} is damaged ({problem}): prepare the dataset again"
            ) from None

    def split(self, name: str) -> SplitInfo:
        """The named split.

        Raises:
            DataError: the dataset has no such split.
        """
        if name not in self.splits:
            raise DataError(
                "dataset.no_split",
                f"the dataset has no {name!r} split (it has {', '.join(self.splits)}); set "
                "validation.paths or validation.fraction and prepare it again",
            )
        return self.splits[name]

    def dump(self) -> bytes:
        """The content of `dataset.json`."""
        return (
            json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
        ).encode()

    def summary(self) -> dict[str, Any]:
        """What `leviathan prep --json` prints; `tokens` counts every id, end-of-text included."""
        return {
            "documents": self.documents,
            "rejected": self.rejected,
            "empty": self.empty,
            "duplicates": self.duplicates,
            "excluded": sum(source.excluded for source in self.sources),
            "tokens": sum(split.ids for split in self.splits.values()),
            "rows": sum(split.rows for split in self.splits.values()),
            "dropped_tail_tokens": self.dropped_tail_tokens,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer.model_dump(),
            "subsets": self.subsets,
            "splits": {name: split.model_dump() for name, split in self.splits.items()},
        }


def _check_tokenizer(directory: Path, info: DatasetInfo) -> None:
    path, ranks = directory / "tokenizer.meta.json", directory / "tokenizer.tiktoken"
    if not ranks.is_file():
        raise DataError("tokenizer.not_found", f"{ranks}: missing: copy the tokenizer files again")
    try:
        meta = json.loads(path.read_bytes())
        found, end_of_text = meta["fingerprint"], meta["special_tokens"]["<|endoftext|>"]
        end_of_text = meta.get("end_of_text", end_of_text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("tokenizer.corrupt", f"{path}: missing or damaged ({error})") from None
    if found != info.tokenizer.fingerprint:
        raise DataError(
            "tokenizer.mismatch",
            f"{path} does not fit the dataset, whose ids are of {info.tokenizer.name} with "
            f"fingerprint {info.tokenizer.fingerprint[:12]}…: copy the tokenizer files again",
        )
    if end_of_text != info.tokenizer.end_of_text:
        raise DataError(
            "dataset.corrupt",
            f"{directory / DATASET_FILE} is damaged: end_of_text is {info.tokenizer.end_of_text}, "
            f"the tokenizer's is {end_of_text}",
        )


def _why_missing(directory: Path) -> str:
    if directory.exists() and not directory.is_dir():
        return f"{directory} is not a directory. Give the output directory of `leviathan prep`."
    if not directory.is_dir():
        return (
            f"no dataset at {directory}: the directory does not exist (run `leviathan prep` first)"
        )
    if slices := sorted((directory / WORK_FOLDER).glob(SLICE_MARK.format(rank="*", world="*"))):
        done = ", ".join(mark.name.replace("-", " ") for mark in slices[:5])
        done += f" and {len(slices) - 5} more" if slices[5:] else ""
        return (
            f"{directory} holds no dataset yet, but finished work ({done}): when all slices are "
            f"done, run `leviathan data merge {directory} [the other slices' folders]`"
        )
    if (directory / WORK_FOLDER).exists():
        return f"the dataset at {directory} is unfinished: run the same `leviathan prep` again"
    return f"{directory} is no dataset: {DATASET_FILE} is missing (run `leviathan prep` first)"
