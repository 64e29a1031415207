"""Checks of a preparation: required disk space, errors that end it, and warnings."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from leviathan.config.data import PrepConfig
from leviathan.config.explain import did_you_mean
from leviathan.console import say
from leviathan.data.format import REJECTS_FILE, DatasetInfo, token_dtype
from leviathan.data.prepare.readers import read
from leviathan.data.prepare.records import Document, rejected_records
from leviathan.data.prepare.sources import Source
from leviathan.data.prepare.tokenize import DOCUMENT_DTYPE, TokenizedFileInfo, TokenizeTask
from leviathan.data.tokenizer import Tokenizer, UnencodableText
from leviathan.errors import DataError
from leviathan.formatting import format_bytes

_SAMPLE_DOCUMENTS = 500
_SAMPLE_CHARACTERS = 200_000  # bytes of text to tokenize: 0.1 s
_ROW_OVERHEAD = 36  # bytes per sample in addition to its tokens
_RECORD = DOCUMENT_DTYPE.itemsize


@dataclass(frozen=True)
class DiskUse:
    """Estimated disk space of a preparation, in bytes.

    Attributes:
        parts: the tokenized files, kept until the end.
        data_set: the shards.
        free: free bytes of the filesystem.
    """

    parts: int
    data_set: int
    free: int

    @property
    def fits(self) -> bool:
        """Whether both fit at the same time."""
        return self.parts + self.data_set <= self.free


def announce(
    pending: Sequence[TokenizeTask],
    packed: Sequence[Source],
    tokenizer: Tokenizer,
    seq_len: int,
    epochs: float,
    out: Path,
) -> DiskUse | None:
    """Estimates the disk space from the beginning of a file and prints it.

    Args:
        pending: tasks that are not tokenized yet.
        packed: tasks that will be packed into shards by this process.
        tokenizer: tokenizer of the dataset.
        seq_len: targets per sample.
        epochs: maximum epochs of a document (mixing).
        out: output directory.

    Returns:
        The estimate; None if sizes are unknown or no text can be read.
    """
    sources = [task.source for task in pending]
    sizes = [[source.size() for source in each] for each in (sources, packed)]
    if not pending or None in sizes[0] + sizes[1]:
        return None
    try:
        sample = _sample(pending[0], tokenizer)
    except DataError:
        return None  # reported by the preparation itself, with file and line
    if sample is None:
        return None
    to_tokenize, to_pack = (sum(filter(None, each)) for each in sizes)
    width = np.dtype(token_dtype(tokenizer.vocab_size)).itemsize
    row = (seq_len + 1) * width + _ROW_OVERHEAD
    use = DiskUse(
        parts=round(to_tokenize * (sample.tokens * width + sample.documents * _RECORD)),
        data_set=round(to_pack * sample.tokens / seq_len * row * epochs),
        free=shutil.disk_usage(next(p for p in (out, *out.absolute().parents) if p.exists())).free,
    )
    say(
        f"estimated {sample.tokens * to_tokenize:,.0f} tokens; disk space: "
        f"{format_bytes(use.parts)} for temporary files, {format_bytes(use.data_set)} for the "
        f"dataset, {format_bytes(use.free)} free"
    )
    if not use.fits:
        say(
            "warning: this will not fit. Free some space, choose another out, or let slices "
            "write their parts to separate disks (executor=rank)",
            style="yellow",
        )
    return use


@dataclass(frozen=True)
class _Sample:
    """Tokens and bytes of text per stored byte."""

    tokens: float
    documents: float


def _sample(task: TokenizeTask, tokenizer: Tokenizer) -> _Sample | None:
    """Statistics of the beginning of a task's source."""
    stored = characters = encoded = tokens = documents = 0

    def on_bytes(count: int) -> None:
        nonlocal stored
        stored += count

    items = read(task.source, on_bytes, reading=task.reading)
    for item in islice(items, _SAMPLE_DOCUMENTS):
        if not isinstance(item, Document) or not item.text or not task.wants(item.subset):
            continue
        documents += 1
        characters += len(item.text)
        if encoded < _SAMPLE_CHARACTERS:
            text = item.text[: _SAMPLE_CHARACTERS - encoded]
            try:
                tokens += len(tokenizer.encode_array(text))
            except UnencodableText:
                continue
            encoded += len(text)
    if not tokens or not stored:
        return None
    return _Sample((characters * tokens / encoded + documents) / stored, documents / stored)


# Minimum number of lines for max_reject_fraction: one bad line of five proves nothing.
FEW_REJECTS = 100


def check_rejects(parts: Mapping[Path, TokenizedFileInfo], limit: float, share: float = 1) -> None:
    """Stops the preparation if too many records are rejected.

    Args:
        parts: tokenized files by directory, in order.
        limit: maximum fraction of rejected records.
        share: fraction of the corpus in `parts`. The rest is assumed to have proportionally many
            lines and none rejected, so that the result does not depend on the order of files.

    Raises:
        DataError: more than `limit` of the records are rejected.
    """
    rejected = sum(info.rejected for info in parts.values())
    lines = rejected + sum(info.documents + info.empty for info in parts.values())
    if rejected > FEW_REJECTS and rejected * share > limit * lines:
        folder = next(folder for folder, info in parts.items() if info.rejected)
        with (folder / REJECTS_FILE).open(encoding="utf-8") as file:
            first = json.loads(file.readline())
        raise DataError(
            "prep.too_many_rejects",
            f"{rejected:,} of {lines:,} records were rejected, more than "
            f"max_reject_fraction={limit}; the first is {first['file']}:{first['line']}: "
            f"{first['reason']}. Tokenized files are kept. Repair the input or raise "
            "max_reject_fraction, then run the same command to resume",
        )


def _check_names_exist(infos: Sequence[TokenizedFileInfo], config: PrepConfig) -> None:
    """Warns about names in `source.subsets` that no document has."""
    seen = {name for info in infos for name in [*info.subsets, *info.excluded]}
    for name in [*config.source.subsets.include, *config.source.subsets.exclude]:
        if name not in seen:
            hint = did_you_mean(name, seen, f"found {', '.join(sorted(seen)[:30])}")
            say(f"warning: source.subsets: no document is in {name!r}; {hint}", style="yellow")


def _check_records_name_subsets(infos: Sequence[TokenizedFileInfo], config: PrepConfig) -> None:
    """Warns about records without a subset name: invalid names, complete files, or all records.

    Raises:
        DataError: no record of the corpus has a subset name, but the configuration selects or
            weights subsets by name.
    """
    place, default = _subset_place(config), config.source.default_subset
    if not any(info.documents or info.empty or info.excluded for info in infos):
        return
    if misnamed := sum(info.misnamed for info in infos):
        example = next(info.misnamed_example for info in infos if info.misnamed)
        say(
            f"warning: {misnamed:,} records have an invalid subset name at {place} and count as "
            f"{default!r}; the first is {example}",
            style="yellow",
        )
    if not any(info.names_subsets(default) for info in infos):
        _refuse_filters_without_names(infos, config)
    elif unnamed := sum(info.unnamed for info in infos):
        filters = config.source.subsets.include or config.source.subsets.exclude or config.mixing
        say(
            f"{unnamed:,} records have no subset name at {place} and count as {default!r}",
            style="yellow" if filters else None,
        )
    without = [
        info
        for info in infos
        if (info.unnamed or info.misnamed) and not info.names_subsets(default)
    ]
    if not without:
        return
    if not any(info.names_subsets(default) for info in infos):
        total = sum(info.unnamed + info.misnamed for info in without)
        say(
            f"warning: none of {total:,} records has a subset name at {place}: all count as "
            f"{default!r}",
            style="yellow",
        )
        return
    more = f" and {len(without) - 5} more files" if without[5:] else ""
    say(
        f"warning: no record in {', '.join(info.path for info in without[:5])}{more} has a subset "
        f"name at {place}, but records of other files have one: the former count as {default!r}",
        style="yellow",
    )


def _refuse_filters_without_names(infos: Sequence[TokenizedFileInfo], config: PrepConfig) -> None:
    """Refuses subset names in the configuration if no record has a subset name.

    The name of the default subset is allowed.

    Raises:
        DataError: names the keys.
    """
    subsets, default = config.source.subsets, {config.source.default_subset}
    names_by_key = {
        "source.subsets.include": subsets.include,
        "source.subsets.exclude": subsets.exclude,
        "mixing": config.mixing,
    }
    keys = [key for key, names in names_by_key.items() if set(names) - default]
    if not keys:
        return
    records = sum(info.unnamed + info.misnamed for info in infos)
    of = f"none of {records:,} records has" if records else "no document (plain text) has"
    raise DataError(
        "prep.no_subsets",
        f"{' and '.join(keys)} cannot be applied: {of} a subset name at {_subset_place(config)}, "
        f"so all count as {config.source.default_subset!r}. Set source.subset_key "
        "(source.hub.subset_column) to the column or path of the names, or remove "
        f"{' and '.join(keys)}; then remove the directory {config.out}, whose files were tokenized "
        "with these settings, or choose another out",
    )


def _subset_place(config: PrepConfig) -> str:
    """The configuration key of the location of subset names, and its value."""
    hub = config.source.hub
    if hub is not None and hub.subset_column is not None:
        return f"source.hub.subset_column={hub.subset_column}"
    return f"source.subset_key={config.source.subset_key}"


def check_documents(infos: Sequence[TokenizedFileInfo], config: PrepConfig) -> None:
    """Warns about anomalies of the corpus.

    Raises:
        DataError: it contains no documents, or no record has a subset name although subsets are
            selected or weighted.
    """
    documents = sum(info.documents for info in infos)
    rejected = sum(info.rejected for info in infos)
    if not any(info.bytes for info in infos):
        raise DataError(
            "prep.no_documents",
            f"no documents in {', '.join(info.path for info in infos[:5])}: only empty files (0 "
            "bytes). Download or copy them again",
        )
    _check_records_name_subsets(infos, config)
    if not documents:
        raise DataError(
            "prep.no_documents",
            f"no documents in {', '.join(info.path for info in infos[:5])}: "
            f"{sum(info.empty for info in infos)} empty texts, {rejected_records(rejected)}, "
            f"{sum(sum(info.excluded.values()) for info in infos)} omitted by source.subsets",
        )
    _check_names_exist(infos, config)
    seen: dict[str, TokenizedFileInfo] = {}
    for info in infos:
        if not info.documents:
            why = "" if info.bytes else ": it is empty (0 bytes)"
            say(f"warning: {info.path} contains no documents{why}", style="yellow")
        elif info.content in seen:
            former = seen[info.content]
            trained_on = (
                ": the validation loss is computed on training texts"
                if former.split != info.split
                else ""
            )
            say(
                f"warning: {info.path} contains the same texts as {former.path}{trained_on}",
                style="yellow",
            )
        seen.setdefault(info.content, info)
    if rejected:
        say(f"warning: {rejected_records(rejected)} omitted, see {REJECTS_FILE}", style="yellow")


def check_validation(
    infos: Sequence[TokenizedFileInfo], made: DatasetInfo, config: PrepConfig
) -> None:
    """Warns if the validation fraction selected no document."""
    if "val" not in made.splits and any(info.split == "hash" for info in infos):
        say(
            f"warning: validation.fraction={config.validation.fraction} held out none of "
            f"{made.documents:,} documents, so that there is no validation split. Raise it, or "
            "set validation.paths",
            style="yellow",
        )
