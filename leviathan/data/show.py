"""Text output of `leviathan data info` and `leviathan data show`."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from leviathan.console import as_text
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import Sample, open_split
from leviathan.data.tokenizer import Tokenizer, load_tokenizer
from leviathan.errors import DataError
from leviathan.formatting import format_bytes


def info_table(summary: dict[str, Any]) -> str:
    """`DatasetInfo.summary()` as tables with units."""
    facts = Table.grid(padding=(0, 2))
    tokenizer = summary["tokenizer"]
    left_out = [
        f"{summary[key]:,} {name}"
        for key, name in (
            ("rejected", "bad lines"),
            ("empty", "empty"),
            ("duplicates", "repeated"),
            ("excluded", "by subset"),
        )
        if summary[key]
    ]
    ids = f"{tokenizer['name']}, {summary['vocab_size']:,} ids"
    ids += f", end-of-text {tokenizer['end_of_text']:,}"
    for name, value in (
        ("tokenizer", ids),
        ("rows", f"{summary['seq_len']:,} targets each, {summary['dtype']}"),
        ("documents", f"{summary['documents']:,}"),
        ("omitted", ", ".join(left_out) or "nothing"),
        ("fingerprint", summary["fingerprint"]),
    ):
        facts.add_row(Text(name, style="bold"), Text(value))
    splits = Table("split", box=None, header_style="bold")
    for title in ("rows", "documents", "tokens", "text", "bytes / token"):
        splits.add_column(title, justify="right")
    for name, split in summary["splits"].items():
        splits.add_row(name, *_sizes(split))
    tables = [facts, Text(), splits]
    if len(summary["subsets"]) > 1:
        tables += [Text(), _subset_table(summary["splits"])]
    return as_text(*tables)


def _sizes(split: dict[str, Any]) -> list[str]:
    per_token = split["bytes_of_text"] / max(1, split["ids"] - split["documents"])
    return [
        f"{split['rows']:,}",
        f"{split['documents']:,}",
        f"{split['ids']:,}",
        format_bytes(split["bytes_of_text"]),
        f"{per_token:.2f}",
    ]


def _subset_table(splits: dict[str, Any]) -> Table:
    table = Table("subset", box=None, header_style="bold")
    for name in splits:
        for title in (f"{name} documents", "tokens", "share"):
            table.add_column(title, justify="right")
    names = {name: None for split in splits.values() for name in split["subsets"]}
    first = next(iter(splits.values()))
    none = {"documents": 0, "ids": 0}
    for name in sorted(names, key=lambda name: -first["subsets"].get(name, none)["ids"]):
        cells: list[str] = []
        for split in splits.values():
            size = split["subsets"].get(name, none)
            share = size["ids"] / max(1, split["ids"])
            cells += [f"{size['documents']:,}", f"{size['ids']:,}", f"{share:.1%}"]
        table.add_row(Text(name), *cells)
    return table


def show_samples(directory: Path, split: str, first: int, count: int) -> dict[str, Any]:
    """Decodes samples `first … first + count - 1` of a split, document by document.

    Returns:
        `{"split", "rows": [{"row", "n_valid", "padding", "documents": [{"document", "subset",
        "ids", "begins", "ends", "text"}]}]}`; `begins` and `ends` state whether the document's
        first and last id are in the sample.

    Raises:
        DataError: the dataset, split or sample does not exist.
    """
    info, tokenizer = DatasetInfo.load(directory), load_tokenizer(directory)
    rows = open_split(directory, info, split)
    if not 0 <= first < len(rows):
        raise DataError(
            "data.no_sample",
            f"{directory / split} has samples 0 to {len(rows) - 1:,}; there is no sample {first:,}",
        )
    numbers = range(first, min(first + count, len(rows)))
    found = []
    for number in numbers:
        before = rows[number - 1] if number else None
        found.append({"row": number} | _describe(rows[number], before, info, tokenizer))
    return {"split": split, "rows": found}


def _describe(
    row: Sample, before: Sample | None, info: DatasetInfo, tokenizer: Tokenizer
) -> dict[str, Any]:
    ids, end = row.tokens[: row.n_valid], info.tokenizer.end_of_text
    cuts = np.flatnonzero(ids == end) + 1
    pieces = [piece for piece in np.split(ids, cuts) if len(piece)]
    if len(pieces) > len(row.subsets) or row.subsets.max(initial=0) >= len(info.subsets):
        raise DataError(
            "dataset.corrupt",
            "the subsets of the sample do not match its documents. Run `leviathan data verify`",
        )
    # The first id of a sample is the last one of the previous sample; its document began there,
    # unless it is the end of another document.
    starts = before is None or before.tokens[-2] == end
    documents = []
    for place, piece in enumerate(pieces):
        ended = bool(piece[-1] == end)
        documents.append(
            {
                "document": row.first_document + place,
                "subset": info.subsets[row.subsets[place]],
                "ids": len(piece),
                "begins": bool(place or starts),
                "ends": ended,
                "text": tokenizer.decode(piece[:-1] if ended else piece),
            }
        )
    return {
        "n_valid": row.n_valid,
        "padding": len(row.tokens) - row.n_valid,
        "documents": documents,
    }


def samples_text(result: dict[str, Any]) -> str:
    """Formats `show_samples` for the terminal: a line before each document, padding marked."""
    parts: list[Any] = []
    for row in result["rows"]:
        title = f"{result['split']} sample {row['row']:,}: {row['n_valid']:,} ids"
        parts.append(Rule(Text(title, style="bold"), align="left"))
        for document in row["documents"]:
            begins = "" if document["begins"] else ", continued from the previous sample"
            ends = "" if document["ends"] else ", continues in the next sample"
            head = f"[document {document['document']:,} · {document['subset']} · "
            head += f"{document['ids']:,} ids{begins}{ends}]"
            parts.append(Text(head, style="cyan"))
            parts.append(Text(document["text"]) + Text("⏎" * document["ends"], style="cyan"))
        if row["padding"]:
            parts.append(
                Text(f"[{row['padding']:,} ids of padding, not trained on]", style="yellow")
            )
    return as_text(*parts)
