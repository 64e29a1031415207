"""Format of a prepared dataset on disk.

    dataset.json            description, written last; without it, a dataset is incomplete
    train/ val/             MDS shards of samples, each with its index.json
    token_counts.npy        int64 [vocab_size]: occurrences of each id in the training split
    tokenizer.tiktoken, tokenizer.meta.json
    rejects.jsonl           quarantined records, if any

A split is one stream of ids: each document's ids, followed by the end-of-text id. Sample i contains
the `seq_len + 1` ids from `i * seq_len` on, so that adjacent samples overlap by one id and every id
except the stream's first is a target exactly once. The last sample is padded with end-of-text ids;
`n_valid` is the number of ids before the padding. Columns of a sample:

    tokens          uint16 or uint32 [seq_len + 1]
    n_valid         int: number of ids before the padding
    first_document  int: number, within the split, of the document that contains the first id
    subsets         uint16: subset number of each document in the sample, in order
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
SLICE_MARK = "slice-{rank}-of-{world}"  # in the work directory of a finished slice
WORK_FOLDER = ".prep"  # exists while a preparation is unfinished


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrower of the two dtypes that can store every id below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TokenizerInfo(_Record):
    """The tokenizer of the ids."""

    name: str
    fingerprint: str
    end_of_text: Count


class SubsetSize(_Record):
    """Size of one subset in a split, with copies and end-of-text ids."""

    documents: Count
    ids: Count


class SplitInfo(_Record):
    """Size of one split.

    Attributes:
        ids: length of the stream, with end-of-text ids.
        tokens: number of targets: every id except the stream's first.
        padded: padding ids in the last sample.
        bytes_of_text: UTF-8 bytes of the documents.
        subsets: size per subset; subsets without documents are omitted.
    """

    rows: Count
    ids: Count
    tokens: Count
    padded: Count
    documents: Count
    bytes_of_text: Count
    subsets: dict[str, SubsetSize] = {}


class SourceInfo(_Record):
    """One source file; `split` is train, val, or hash if the content of each document decides.

    `excluded` documents were omitted because of their subset. A source with a backend mismatch was
    encoded by tiktoken, because a faster encoder gave other ids for one of its documents.
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
    """`dataset.json`: content and origin of a dataset.

    `fingerprint` covers the ids and their order, not where or how they were made; it seeds the
    training order. `config` omits keys that do not change the result: `out`, `workers`, `executor`.
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
            raise ValueError(f"dtype {self.dtype} does not match {self.vocab_size} ids")
        if self.tokenizer.end_of_text >= self.vocab_size:
            raise ValueError(f"end_of_text is not below the {self.vocab_size} ids")
        if not {"train"} <= set(self.splits) <= {"train", "val"}:
            raise ValueError("splits must be train and, optionally, val")
        for name, split in self.splits.items():
            targets = max(0, split.ids - 1)
            if (split.tokens, split.padded) != (targets, split.rows * self.seq_len - targets):
                raise ValueError(f"splits.{name}: rows, ids, tokens and padded are inconsistent")
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
            DataError: the dataset is missing, unfinished, corrupt or of a newer version, or its
                tokenizer does not match.
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
                "dataset.corrupt", f"{path} is corrupt ({error}). Prepare the dataset again"
            ) from None
        if version != FORMAT_VERSION:
            raise DataError(
                "dataset.other_version",
                f"{path}: format version {version}, but this version of leviathan reads "
                f"{FORMAT_VERSION}",
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
                "dataset.corrupt", f"{path} is corrupt ({problem}). Prepare the dataset again"
            ) from None

    def split(self, name: str) -> SplitInfo:
        """Returns the size of a split.

        Raises:
            DataError: the split does not exist.
        """
        if name not in self.splits:
            raise DataError(
                "dataset.no_split",
                f"the dataset has no {name!r} split (it has {', '.join(self.splits)}). Set "
                "validation.paths or validation.fraction and prepare it again",
            )
        return self.splits[name]

    def dump(self) -> bytes:
        """The content of `dataset.json`."""
        return (
            json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
        ).encode()

    def summary(self) -> dict[str, Any]:
        """Values that `leviathan prep --json` prints; `tokens` counts all ids, with end-of-text."""
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
        raise DataError("tokenizer.not_found", f"{ranks}: missing. Copy the tokenizer files again")
    try:
        meta = json.loads(path.read_bytes())
        found, end_of_text = meta["fingerprint"], meta["special_tokens"]["<|endoftext|>"]
        end_of_text = meta.get("end_of_text", end_of_text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("tokenizer.corrupt", f"{path}: missing or corrupt ({error})") from None
    if found != info.tokenizer.fingerprint:
        raise DataError(
            "tokenizer.mismatch",
            f"{path} does not match the dataset, whose ids are of {info.tokenizer.name} with "
            f"fingerprint {info.tokenizer.fingerprint[:12]}…: copy the tokenizer files again",
        )
    if end_of_text != info.tokenizer.end_of_text:
        raise DataError(
            "dataset.corrupt",
            f"{directory / DATASET_FILE} is corrupt: end_of_text is "
            f"{info.tokenizer.end_of_text}, the tokenizer's is {end_of_text}",
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
            f"{directory} contains finished work ({done}), but no dataset yet. When all slices "
            f"are done, run `leviathan data merge {directory} [the other slices' directories]`"
        )
    if (directory / WORK_FOLDER).exists():
        return (
            f"the dataset at {directory} is unfinished. Run the same `leviathan prep` "
            "command to resume"
        )
    return f"{directory} is not a dataset: {DATASET_FILE} is missing (run `leviathan prep` first)"
