"""`leviathan data split`: a finished dataset → one complete dataset per subset.

Nothing is tokenized again: every document ends with end-of-text, so the documents are found in the
samples, and their ids are read from there.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from leviathan.console import progress_bar, say
from leviathan.data.format import DatasetInfo, SourceInfo
from leviathan.data.mds import ShardContent, ShardReader, open_split, read_shard
from leviathan.data.prepare.build import DatasetSpec, EmptyTrainingSplit, build_dataset
from leviathan.data.prepare.executors import Pool, open_local_pool
from leviathan.data.prepare.packing import Selection, TokenizedFile
from leviathan.data.prepare.pipeline import explain_stop
from leviathan.data.prepare.tokenize import DOCUMENT_DTYPE, TRAIN, VAL
from leviathan.data.prepare.workdir import WorkDir, check_same, is_finished, lock_for_writing
from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.errors import DataError
from leviathan.files import check_writable_dir

_SPLITS = {"train": TRAIN, "val": VAL}


@dataclass(frozen=True)
class SampleIds:
    """The stream of a finished split as a tokenized file."""

    folder: Path
    seq_len: int
    dtype: str

    @cached_property
    def _rows(self) -> ShardReader:
        return ShardReader(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "seq_len": self.seq_len, "dtype": self.dtype}

    def read(self, begin: int, end: int) -> np.ndarray:
        """Ids `begin … end - 1` of the stream."""
        first, last = begin // self.seq_len, (end - 1) // self.seq_len
        last = min(last, len(self._rows) - 1)  # the stream's last id has no sample of its own
        pieces = [self._rows[row].tokens[:-1] for row in range(first, last)]
        ids = np.concatenate([*pieces, self._rows[last].tokens])
        start = begin - first * self.seq_len
        return ids[start : start + end - begin].astype(self.dtype)


def split_by_subset(source: Path, out: Path, workers: int = 1) -> dict[str, Any]:
    """Writes `out/NAME` for every subset of `source` with training documents.

    Each is complete when its `dataset.json` exists; complete ones are skipped when run again.

    Returns:
        Subset → `{"path", "train_tokens", "val_tokens"}`, counting every id.

    Raises:
        DataError: `source` is corrupt, or an output directory contains other files.
    """
    info, tokenizer = DatasetInfo.load(source), load_tokenizer(source)
    names = _folder_names(info.subsets)
    check_writable_dir(out)
    result: dict[str, Any] = {}
    with lock_for_writing(out), explain_stop(out), open_local_pool(workers) as pool:
        tables = out / ".documents"
        pending = [name for name in info.subsets if not is_finished(out / names[name])]
        if pending:
            _find_documents(source, info, tokenizer, tables)
        for number, name in enumerate(info.subsets):
            target = out / names[name]
            try:
                made = _make(source, info, tokenizer, number, tables, target, pool)
            except EmptyTrainingSplit:
                say(f"{name!r} has no training documents: omitted", style="yellow")
                continue
            result[name] = {
                "path": str(target),
                **{f"{split}_tokens": size.ids for split, size in made.splits.items()},
            }
        for table in tables.glob("*"):
            table.unlink()
        if tables.exists():
            tables.rmdir()
    return result


def _make(
    source: Path,
    info: DatasetInfo,
    tokenizer: Tokenizer,
    number: int,
    tables: Path,
    target: Path,
    pool: Pool,
) -> DatasetInfo:
    name = info.subsets[number]
    config = info.config | {"split_of": info.fingerprint, "subset": name}
    if is_finished(target):
        made = DatasetInfo.load(target)
        check_same(made.config, config, target)
        say(f"{target} is complete. Nothing to do.")
        return made
    parts = [
        TokenizedFile(
            table=tables / split,
            ids=SampleIds(source / split, info.seq_len, info.dtype),
            subset_of=np.zeros(len(info.subsets), np.uint16),
            only=number,
        )
        for split in info.splits
    ]
    recipe = DatasetSpec(
        tokenizer=tokenizer,
        seq_len=info.seq_len,
        subsets=[name],
        parts=parts,
        made_of=[info.fingerprint, name],
        choices={split: Selection(_SPLITS[split]) for split in info.splits},
        sources=[_source(source, info, split, name) for split in info.splits],
        config=config,
    )
    with lock_for_writing(target), WorkDir(target, {"split_of": info.fingerprint}) as workdir:
        return build_dataset(recipe, workdir, pool)


def _source(source: Path, info: DatasetInfo, split: str, subset: str) -> SourceInfo:
    size = info.splits[split].subsets.get(subset)
    return SourceInfo(
        path=f"{source / split} ({subset})",
        bytes=sum(shard.raw_data.bytes for shard in open_split(source, info, split).shards),
        sha256=info.fingerprint,
        documents=size.documents if size else 0,
        empty=0,
        rejected=0,
        split="train" if split == "train" else "val",
    )


def _folder_names(subsets: list[str]) -> dict[str, str]:
    """Pile-CC → pile-cc, Wikipedia (en) → wikipedia-en; equal results get a number."""
    names: dict[str, str] = {}
    for subset in subsets:
        name = base = re.sub(r"[^\w.]+", "-", subset.lower()).strip("-.") or "subset"
        number = 2
        while name in names.values():
            name, number = f"{base}-{number}", number + 1
        names[subset] = name
    return names


# ---------------------------------------------------------------- documents in rows


def _find_documents(source: Path, info: DatasetInfo, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the document table of each split: 35 bytes per document."""
    folder.mkdir(parents=True, exist_ok=True)
    bytes_of = np.zeros(info.vocab_size, np.int64)
    bytes_of[list(tokenizer.ranks.values())] = [len(token) for token in tokenizer.ranks]
    total = sum(split.rows for split in info.splits.values())
    with progress_bar("finding documents (samples)", total=total) as bar:
        for split in info.splits:
            with (folder / split).open("wb") as file:
                for table in _tables(source, info, split, bytes_of, bar.advance):
                    table["split"] = _SPLITS[split]
                    file.write(table.tobytes())


def _tables(
    source: Path,
    info: DatasetInfo,
    split: str,
    bytes_of: np.ndarray,
    on_rows: Callable[[float], Any],
) -> Iterator[np.ndarray]:
    """A table of the documents that end in each shard."""
    rows = open_split(source, info, split)
    length = text = 0  # ids of the document that has not ended yet
    for number, shard in enumerate(rows.shards):
        content = read_shard(rows.directory / shard.raw_data.basename, info.seq_len, info.dtype)
        ids = _new_ids(content, is_first=number == 0)
        ends = np.flatnonzero(ids == info.tokenizer.end_of_text) + 1
        table = np.zeros(len(ends), DOCUMENT_DTYPE)
        texts = np.concatenate([[0], np.cumsum(bytes_of[ids])])
        # If the shared first id is an end-of-text, its document ended in the previous shard.
        skipped = int(number > 0 and content.tokens[0, 0] == info.tokenizer.end_of_text)
        table["length"] = np.diff(ends, prepend=0)
        table["bytes"] = np.diff(texts[ends], prepend=0)
        table["subset"] = _subsets_of(content)[skipped : skipped + len(ends)]
        if len(ends):
            table[0]["length"] += length
            table[0]["bytes"] += text
            length = text = 0
        rest = int(ends[-1]) if len(ends) else 0
        length, text = length + len(ids) - rest, text + int(texts[-1] - texts[rest])
        yield table
        on_rows(shard.samples)
    if length:
        raise DataError(
            "dataset.corrupt",
            f"{rows.directory}: its last document is incomplete. Run `leviathan data verify`",
        )


def _new_ids(content: ShardContent, is_first: bool) -> np.ndarray:
    """The shard's part of the stream without the id that it shares with the previous shard."""
    last = content.tokens[-1, : content.n_valid[-1]]
    ids = np.concatenate([content.tokens[:-1, :-1].reshape(-1), last])
    return ids if is_first else ids[1:]


def _subsets_of(content: ShardContent) -> np.ndarray:
    """The subset of each document that has an id in the shard, in order; uint16 [documents]."""
    start = content.first_document - content.first_document[0]
    place = np.repeat(start - (np.cumsum(content.documents) - content.documents), content.documents)
    place += np.arange(len(place))  # a document is in every sample that contains one of its ids
    subsets = np.zeros(int(place.max()) + 1, np.uint16)
    subsets[place] = content.subsets
    return subsets
