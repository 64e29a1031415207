"""The quickstart's corpus: reproducible, without overlap, with answerable questions."""

import json
from pathlib import Path

from leviathan.data.prepare.readers import read
from leviathan.data.prepare.records import Document
from leviathan.data.prepare.sources import FileSource
from leviathan.data.prepare.stdlib_corpus import DOCSTRINGS, SOURCES, write_stdlib_corpus


def test_corpus(tmp_path: Path) -> None:
    first = write_stdlib_corpus(tmp_path / "a", shards=2, max_bytes=600_000)
    again = write_stdlib_corpus(tmp_path / "b", shards=2, max_bytes=600_000)
    assert first == again
    for name in first["files"]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    texts: dict[str, list[Document]] = {}
    for name in ("train-00.jsonl.zst", "train-01.jsonl.zst", "heldout.jsonl.zst"):
        found = list(read(FileSource(tmp_path / "a" / name)))
        texts[name] = [item for item in found if isinstance(item, Document)]
        assert len(texts[name]) == len(found) > 0
    everything = [document.text for documents in texts.values() for document in documents]
    assert len(set(everything)) == len(everything) == first["documents"]
    assert first["bytes_of_text"] == sum(len(text.encode()) for text in everything) <= 600_000
    assert {document.subset for document in texts["train-00.jsonl.zst"]} >= {SOURCES, DOCSTRINGS}

    held_out = [document.text for document in texts["heldout.jsonl.zst"]]
    questions = [json.loads(line) for line in (tmp_path / "a/choices.jsonl").open()]
    assert len(questions) == 100
    for question in questions:
        assert len(set(question["choices"])) == 4
        right = question["context"] + question["choices"][question["answer"]]
        assert any(right in text for text in held_out)
        for place, wrong in enumerate(question["choices"]):
            if place != question["answer"]:
                assert not any(question["context"] + wrong + "\n" in text for text in held_out)
    assert {question["answer"] for question in questions} == {0, 1, 2, 3}


def test_a_complete_corpus_is_left_alone(tmp_path: Path) -> None:
    first = write_stdlib_corpus(tmp_path, shards=1, max_bytes=300_000)
    shard = tmp_path / "train-00.jsonl.zst"
    before = shard.stat().st_mtime_ns
    assert write_stdlib_corpus(tmp_path, shards=1, max_bytes=300_000) == first
    assert shard.stat().st_mtime_ns == before
    shard.write_bytes(b"corrupt")
    write_stdlib_corpus(tmp_path, shards=1, max_bytes=300_000)
    assert shard.stat().st_size == first["files"]["train-00.jsonl.zst"]
