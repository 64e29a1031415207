"""Writes small corpus files with the defects that users of comparable projects met."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from backports import zstd

from leviathan.data.tokenizer import Tokenizer

SUBSETS = ("functions", "classes")


def write_collection(folder: Path, texts: list[str], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Writes the files to `folder`; returns the expected outcome of each.

    Args:
        folder: a new directory.
        texts: 20 documents or more.
        tokenizer: tokenizer of the expected numbers of tokens.
    """
    (folder / "duplicate").mkdir(parents=True)
    same = [record(text, SUBSETS[n % 2]) for n, text in enumerate(texts[:20])]
    special = [f"<|endoftext|> is text, {n}" for n in range(6)]
    empty = ["", *texts[:2], "", ""]
    files: dict[str, tuple[list[bytes], int | None]] = {
        "reference.jsonl.zst": (same, 20),
        "same20.plain.jsonl": (same, 20),
        "same20.jsonl.gz": (same, 20),
        "duplicate/00.jsonl.zst": (same, 20),
        "duplicate/01.jsonl.zst": (same, 20),
        "empty_texts.jsonl.zst": ([record(text) for text in empty], 2),
        "one_line_5mb.jsonl.zst": ([record("\n".join(texts) * 20)], 1),
        "crlf_no_final_newline.jsonl": ([record(text) for text in texts[:6]], 6),
        "utf8_bom.jsonl.zst": ([record(text) for text in texts[:5]], 5),
        "special_token_strings.jsonl.zst": ([record(text) for text in special], 6),
        "invalid_utf8.jsonl.zst": (with_lines(same[:5], {2: b'{"text": "caf\xe9"}'}), 4),
        "missing_text_key.jsonl.zst": (with_lines(same[:4], {1: b'{"content": "x"}'}), 3),
        "text_not_a_string.jsonl.zst": (
            with_lines(same[:6], {n: b'{"text": %s}' % v for n, v in NOT_STRINGS.items()}),
            3,
        ),
    }
    expected = []
    for name, (lines, documents) in files.items():
        content = b"".join(line + b"\n" for line in lines)
        if name.startswith("crlf"):
            content = content.replace(b"\n", b"\r\n").removesuffix(b"\r\n")
        if name.startswith("utf8_bom"):
            content = b"\xef\xbb\xbf" + content
        (folder / name).write_bytes(packed(name, content))
        ids = (
            None if "invalid" in name else sum(map(len, map(tokenizer.encode_array, valid(lines))))
        )
        expected.append(
            {"file": name, "lines": len(lines), "good_documents": documents, "tokens": ids}
        )
    whole = packed("x.zst", b"\n".join(same))
    (folder / "truncated.jsonl.zst").write_bytes(whole[: len(whole) * 3 // 4])
    (folder / "truncated_at_frame_header.jsonl.zst").write_bytes(whole[:5])
    (folder / "empty_frame.jsonl.zst").write_bytes(packed("x.zst", b""))
    (folder / "zero_bytes.jsonl.zst").touch()
    rows = [json.loads(line) for line in same]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "same20.parquet", row_group_size=7)
    return expected


NOT_STRINGS = {1: b"null", 2: b"7", 3: b'["x"]'}


def record(text: str, subset: str = SUBSETS[0]) -> bytes:
    """One line of a corpus in The Pile's format."""
    return json.dumps({"text": text, "meta": {"pile_set_name": subset}}).encode()


def with_lines(lines: list[bytes], replaced: dict[int, bytes]) -> list[bytes]:
    """The lines with some of them replaced, by index."""
    return [replaced.get(number, line) for number, line in enumerate(lines)]


def valid(lines: list[bytes]) -> list[str]:
    """The texts of the valid records."""
    texts = [json.loads(line).get("text") for line in lines]
    return [text for text in texts if isinstance(text, str)]


def packed(name: str, content: bytes) -> bytes:
    """The content as the suffix of the name requires."""
    if name.endswith(".zst"):
        return zstd.compress(content, 3 if "01" in name else 9)
    return gzip.compress(content) if name.endswith(".gz") else content
