"""Datasets of the Hugging Face Hub, read as a stream; each of their shards is one task."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from leviathan.config.data import HubConfig
from leviathan.data.prepare.records import (
    Document,
    InvalidRecord,
    RecordSchema,
    RejectedRecord,
    document,
)
from leviathan.data.prepare.sources import Source
from leviathan.errors import DataError


@dataclass(frozen=True)
class HubSource(Source):
    """One shard of one split of a dataset, at one version.

    Attributes:
        origin: identifies the version: the commit, or the state of a local directory's files.
    """

    hub: HubConfig
    index: int
    count: int
    origin: str

    @property
    @override
    def name(self) -> str:
        config = f"[{self.hub.config}]" if self.hub.config else ""
        where = f"{self.hub.id}{config}/{self.hub.split}"
        return f"hub:{where} shard {self.index:05}-of-{self.count:05}"

    @override
    def size(self) -> None:
        return None

    @override
    def stamp(self) -> str:
        return self.origin

    @property
    def reading(self) -> dict[str, str]:
        """Location of text and subset, for `RecordSchema`."""
        keys = {"text_key": self.hub.text_column}
        return keys | ({"subset_key": self.hub.subset_column} if self.hub.subset_column else {})


def find_hub(hub: HubConfig, key: str = "source.hub") -> list[Source]:
    """Lists the shards of a Hub dataset, or of a local directory that `datasets` can load.

    With several splits (`train+test`, `all`), the shards are ordered by split.

    Args:
        hub: the dataset, configuration and splits to read.
        key: its key in the configuration, for messages.

    Raises:
        DataError: the dataset, configuration, split or column does not exist, or the Hub is
            unreachable.
    """
    builder = _builder(hub, hub.revision, key)
    sources: list[Source] = []
    for name in _split_names(builder, hub, key):
        single = hub.model_copy(update={"split": name})
        stream = _stream(builder, single, key)
        columns = stream.column_names
        for column in (hub.text_column, hub.subset_column):
            if column is None or columns is None:
                continue
            if column not in columns and column.partition(".")[0] not in columns:
                raise DataError(
                    "hub.no_column",
                    f"{key} {hub.id}: no column {column!r} (columns: {', '.join(columns)})",
                )
        count, origin = stream.num_shards, _origin(builder, single)
        sources += [HubSource(single, index, count, origin) for index in range(count)]
    return sources


def _split_names(builder: Any, hub: HubConfig, key: str) -> list[str]:
    """The splits that `hub.split` names; whether they exist is checked when they are read."""
    names = [name.strip() for name in hub.split.split("+")]
    known = [str(name) for name in builder.config.data_files or builder.info.splits or ()]
    if names == ["all"] and known and "all" not in known:
        return known
    if len(set(names)) < len(names):
        raise DataError("hub.duplicate_split", f"{key} {hub.id}: {hub.split!r} names a split twice")
    return names


def read_hub(
    source: HubSource, reading: RecordSchema, on_bytes: Callable[[int], Any] | None, digest: Any
) -> Iterator[Document | RejectedRecord]:
    """Yields the documents of one shard; `line` counts its records."""
    builder = _builder(source.hub, source.hub.revision)
    stream = _stream(builder, source.hub)
    if (stream.num_shards, _origin(builder, source.hub)) != (source.count, source.origin):
        raise DataError(
            "hub.changed",
            f"{source.name}: the dataset has changed since it was listed. Run the command again",
        )
    rows = iter(stream.shard(num_shards=source.count, index=source.index))
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the exception of a corrupt shard depends on its format
            raise DataError(
                "hub.unreadable",
                f"{source.name}: cannot be read after record {number:,} ({_reason(error)})",
            ) from None
        number += 1
        try:
            found = document(row, reading, number, None)
        except InvalidRecord as error:
            yield RejectedRecord(number, None, str(error))
            continue
        text = found.text.encode()
        if digest is not None:
            digest.update(b"%d\n" % len(text) + text)
        if on_bytes is not None:
            on_bytes(len(text))
        yield (
            found
            if len(text) <= reading.max_document_bytes
            else RejectedRecord(number, None, reading.too_long)
        )


def _builder(hub: HubConfig, revision: str | None, key: str = "source.hub") -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset_builder(hub.id, hub.config, revision=revision)
    except Exception as error:  # from the Hub, from the network, or from the dataset's format
        raise DataError(
            "hub.not_loaded", f"{key} {hub.id}: cannot be loaded ({_reason(error)})"
        ) from None


def _stream(builder: Any, hub: HubConfig, key: str = "source.hub") -> Any:
    try:
        return builder.as_streaming_dataset(split=hub.split)
    except Exception as error:
        is_missing = str(error).startswith("Bad split")
        problem = f"no split {hub.split!r}" if is_missing else f"{hub.split!r} cannot be read"
        raise DataError("hub.not_loaded", f"{key} {hub.id}: {problem} ({_reason(error)})") from None


def _origin(builder: Any, hub: HubConfig) -> str:
    files = builder.config.data_files
    known = [list(map(str, found)) for found in files[hub.split].origin_metadata] if files else []
    if Path(hub.id).is_dir():  # only the modification time is recorded there
        known += [[name, str(Path(name).stat().st_size)] for name in files[hub.split]]
    return hashlib.sha256(repr([known, builder.hash]).encode()).hexdigest()[:32]


def _reason(error: Exception) -> str:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)  # pyright: ignore[reportArgumentType]
    first = next((line for line in str(causes[-1]).splitlines() if line.strip()), "")
    return f"{type(causes[-1]).__name__}: {first[:300]}"
