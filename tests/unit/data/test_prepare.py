"""Preparation end to end: output, input and interruptions."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
from errors import raises_error
from prep_cases import hashes, shards, start_preparation, stream_of, wait_for_orphans

from leviathan.config.data import PrepConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import ShardReader
from leviathan.data.prepare import prepare, verify
from leviathan.data.prepare.readers import read
from leviathan.data.prepare.records import Document
from leviathan.data.prepare.sources import find_inputs
from leviathan.data.prepare.workdir import lock_for_writing
from leviathan.data.tokenizer import load_tokenizer, train_bpe

Prepare = Callable[..., dict[str, Any]]


def texts_of(paths: list[str]) -> list[str]:
    found = [item for source in find_inputs(paths) for item in read(source)]
    return [item.text for item in found if isinstance(item, Document)]


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize("seq_len", [1, 7, 32, 100_000])
def test_every_id_is_a_target_exactly_once(
    config: Callable[..., PrepConfig], tiny_corpus: Path, seq_len: int
) -> None:
    wanted = config(seq_len=seq_len)
    if seq_len == 1:  # one row a token: a smaller corpus will do
        small = shards(wanted.out.parent / "small", [["ab cd" * 20, "x"], ["y z" * 9]])
        wanted = config(seq_len=1, source={"paths": small})
    result = prepare(wanted)
    tokenizer = load_tokenizer(wanted.out)
    expected: list[int] = []
    for text in texts_of(wanted.source.paths):
        expected += [*tokenizer.encode(text), tokenizer.end_of_text]
    rows = list(ShardReader(wanted.out / "train"))
    assert stream_of(wanted.out / "train").tolist() == expected
    for row, following in pairwise(rows):
        assert row.n_valid == seq_len + 1
        assert row.tokens[-1] == following.tokens[0]
    last = rows[-1]
    assert len(last.tokens) == seq_len + 1
    assert 2 <= last.n_valid <= seq_len + 1
    assert (last.tokens[last.n_valid :] == tokenizer.end_of_text).all()
    assert result["tokens"] == len(expected)
    assert result["dropped_tail_tokens"] == 0
    split = DatasetInfo.load(wanted.out).splits["train"]
    assert split.tokens == len(expected) - 1 == sum(row.n_valid - 1 for row in rows)
    assert split.padded == sum(seq_len + 1 - row.n_valid for row in rows)
    counts = np.load(wanted.out / "token_counts.npy")
    assert counts.tolist() == np.bincount(expected, minlength=601).tolist()


def test_rows_name_their_documents_and_subsets(config: Callable[..., PrepConfig]) -> None:
    wanted = config(seq_len=16)
    prepare(wanted)
    info = DatasetInfo.load(wanted.out)
    assert info.subsets == ["classes", "functions"]
    of_document = [
        info.subsets.index(item.subset)
        for source in find_inputs(wanted.source.paths)
        for item in read(source)
        if isinstance(item, Document)
    ]
    document = 0
    for row in ShardReader(wanted.out / "train"):
        assert row.first_document == document
        ends = int((row.tokens[: row.n_valid - 1] == 600).sum())
        assert row.subsets.tolist() == of_document[document : document + ends + 1]
        document += ends
    assert document + 1 == len(of_document) == info.documents


def test_rows_are_those_that_the_library_reads(config: Callable[..., PrepConfig]) -> None:
    wanted = config()
    prepare(wanted)
    ours = ShardReader(wanted.out / "train")
    theirs = streaming.StreamingDataset(
        local=str(wanted.out / "train"), shuffle=False, batch_size=1
    )
    assert len(ours) == theirs.num_samples
    for number in range(len(ours)):
        row, sample = ours[number], theirs[number]
        assert sample["tokens"].dtype == np.uint16
        assert np.array_equal(row.tokens, sample["tokens"])
        assert np.array_equal(row.subsets, sample["subsets"])
        assert row.first_document == sample["first_document"]
        assert row.n_valid == sample["n_valid"]


def test_wide_vocabularies_are_not_cut(
    config: Callable[..., PrepConfig], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data/tiktoken_cache"))
    wanted = config(tokenizer="o200k_base")
    assert prepare(wanted)["dtype"] == "uint32"
    assert stream_of(wanted.out / "train").max() == 199_999


def test_verify_accepts_and_names_damage(config: Callable[..., PrepConfig]) -> None:
    wanted = config(validation={"fraction": 0.2})
    result = prepare(wanted)
    assert verify(wanted.out) == result | {"verified": True}
    shard = wanted.out / "val/shard.00000.mds"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with raises_error("verify.hash", "val/shard.00000.mds", "sha256"):
        verify(wanted.out)
    content[-1] ^= 1
    shard.write_bytes(content)
    np.save(wanted.out / "token_counts.npy", np.zeros(601, np.int64))
    with raises_error("verify.token_counts", "token_counts.npy"):
        verify(wanted.out)


# ---------------------------------------------------------------- splits and duplicates


def test_held_out_files(config: Callable[..., PrepConfig], tmp_path: Path) -> None:
    paths = shards(tmp_path / "in", [["a" * 50, "b" * 50], ["c" * 50]])
    held_out = {"paths": [paths[1]]}
    wanted = config(source={"paths": [str(tmp_path / "in")]}, validation=held_out)
    result = prepare(wanted)
    assert result["splits"]["train"]["documents"] == 2
    assert result["splits"]["val"]["documents"] == 1
    tokenizer = load_tokenizer(wanted.out)
    assert tokenizer.decode(stream_of(wanted.out / "val")).startswith("ccc")
    with raises_error("source.all_held_out"):
        prepare(config(source={"paths": paths}, validation={"paths": paths}, out=tmp_path / "x"))


def test_split_by_content_never_moves(config: Callable[..., PrepConfig], tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(400)]
    few = shards(tmp_path / "few", [texts[:200]])
    many = shards(tmp_path / "many", [texts[200:], texts[:200][::-1]])
    held_out = []
    for name, paths in (("a", few), ("b", many)):
        wanted = config(source={"paths": paths}, validation={"fraction": 0.25}, out=tmp_path / name)
        assert 0.15 < prepare(wanted)["splits"]["val"]["documents"] / len(texts_of(paths)) < 0.35
        tokenizer = load_tokenizer(wanted.out)
        text = tokenizer.decode(stream_of(wanted.out / "val"))
        held_out.append({part for part in text.split("<|endoftext|>") if part})
    assert held_out[0] == held_out[1] & set(texts[:200])


def test_duplicates(
    config: Callable[..., PrepConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = shards(tmp_path / "in", [["one", "two", "one"], ["one", "two", "one"], ["two", "six"]])
    source = {"source": {"paths": paths[:2]}, "validation": {"paths": paths[2:]}}
    assert prepare(config(**source))["documents"] == 8
    assert "01.jsonl.zst contains the same texts as" in capsys.readouterr().err
    wanted = config(**source, deduplicate=True, out=tmp_path / "unique")
    result = prepare(wanted)
    assert (result["documents"], result["duplicates"]) == (3, 5)
    tokenizer = load_tokenizer(wanted.out)
    assert tokenizer.decode(stream_of(wanted.out / "train")) == "one<|endoftext|>"
    assert verify(wanted.out)["documents"] == 3
    all_held_out = {"source": {"paths": paths[:1]}, "validation": {"paths": paths[1:2]}}
    with raises_error("prep.nothing_to_train_on"):
        prepare(config(**all_held_out, deduplicate=True, out=tmp_path / "none"))
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------- same bytes, whatever happens


def test_bytes_do_not_depend_on_workers_or_folder(
    config: Callable[..., PrepConfig], tiny_corpus: Path, tmp_path: Path
) -> None:
    results = []
    for workers in (1, 2, 3):
        wanted = config(workers=workers, out=tmp_path / f"w{workers}", validation={"fraction": 0.1})
        prepare(wanted)
        results.append(hashes(wanted.out))
    assert results[0] == results[1] == results[2]
    # The same files elsewhere, created in another order: all but the recorded paths is equal.
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in sorted(tiny_corpus.iterdir(), reverse=True):
        shutil.copy(path, moved / path.name)
    wanted = config(
        source={"paths": [str(moved)]}, out=tmp_path / "m", validation={"fraction": 0.1}
    )
    fingerprint = prepare(wanted)["fingerprint"]
    found = hashes(wanted.out)
    assert results[0].pop("dataset.json") != found.pop("dataset.json")
    assert results[0] == found
    assert fingerprint == DatasetInfo.load(tmp_path / "w1").fingerprint


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_continued(
    config: Callable[..., PrepConfig],
    tmp_path: Path,
    workers: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [f"shard {n}: " + " ".join(map(str, range(n, n + 5_000))) for n in range(8)]
    source = {"paths": shards(tmp_path / "in", [[text] * 4 for text in texts])}
    undisturbed = config(source=source, out=tmp_path / "undisturbed")
    prepare(undisturbed)
    disturbed = config(source=source, workers=workers)
    process = start_preparation(disturbed)
    parts = disturbed.out / ".prep/parts"
    deadline = time.monotonic() + 60
    while not (parts / "00003").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (parts / "00003").exists()
    assert not (disturbed.out / "dataset.json").exists()
    with raises_error("dataset.not_found"):
        DatasetInfo.load(disturbed.out)
    wait_for_orphans(process.pid)
    for folder in (disturbed.out / "train", disturbed.out / ".prep/train"):
        folder.mkdir(exist_ok=True)
        (folder / "shard.00000.mds").write_bytes(b"half a shard of a killed packing")
    (disturbed.out / ".tokenizer.tiktoken.7.tmp").touch()
    kept = len(list(parts.glob("?????")))
    prepare(disturbed)
    assert f"resuming: {kept} of 8 files" in capsys.readouterr().err
    assert hashes(disturbed.out) == hashes(undisturbed.out)


def test_a_finished_one_says_so_at_once(
    config: Callable[..., PrepConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = config(source={"paths": shards(tmp_path / "in", [["abc"], ["def"]])})
    first = prepare(wanted)
    before = hashes(wanted.out)
    (wanted.out / ".prep").mkdir()  # as if killed between the last write and cleaning up
    (wanted.out / ".prep.lock").touch()
    (wanted.out / ".tokenizer.tiktoken.7.tmp").touch()
    started = time.monotonic()
    assert prepare(wanted) == first
    assert time.monotonic() - started < 1
    assert hashes(wanted.out) == before
    assert "is complete" in capsys.readouterr().err
    shards(tmp_path / "in", [["abc"], ["other"]])
    with raises_error("prep.other_sources", "01.jsonl.zst"):
        prepare(wanted)


def test_another_configuration_is_refused(config: Callable[..., PrepConfig]) -> None:
    wanted = config()
    prepare(wanted)
    before = hashes(wanted.out)
    with raises_error("prep.other_config", "seq_len", "32", "64"):
        prepare(config(seq_len=64))
    assert hashes(wanted.out) == before


def test_a_tokenizer_trained_anew_is_another_configuration(
    config: Callable[..., PrepConfig], tiny_corpus: Path, tmp_path: Path
) -> None:
    vocabulary = tmp_path / "own.tiktoken"
    train_bpe([tiny_corpus], 300, vocabulary)
    prepare(config(tokenizer=str(vocabulary)))
    train_bpe([tiny_corpus], 310, vocabulary)
    with raises_error("prep.other_config"):
        prepare(config(tokenizer=str(vocabulary)))


def test_an_unfinished_one_of_another_configuration_is_refused(
    config: Callable[..., PrepConfig], tmp_path: Path
) -> None:
    paths = shards(tmp_path / "in", [["fine"], ["fine"]])
    Path(paths[1]).write_bytes(Path(paths[1]).read_bytes()[:-4])
    with raises_error("source.truncated"):
        prepare(config(source={"paths": paths}))
    with raises_error("prep.other_config", "seq_len"):
        prepare(config(source={"paths": paths}, seq_len=64))
    shards(tmp_path / "in", [["fine"], ["fine"]])  # repaired
    assert prepare(config(source={"paths": paths}))["documents"] == 2


def test_a_folder_of_something_else_is_refused(config: Callable[..., PrepConfig]) -> None:
    wanted = config()
    wanted.out.mkdir()
    (wanted.out / "thesis.tex").write_text("x")
    with raises_error("prep.not_empty", "thesis.tex"):
        prepare(wanted)
    assert [path.name for path in wanted.out.iterdir()] == ["thesis.tex"]


def test_two_writers_are_refused(config: Callable[..., PrepConfig]) -> None:
    wanted = config()
    with (
        lock_for_writing(wanted.out),
        raises_error("prep.locked"),
    ):
        prepare(wanted)
    prepare(wanted)


# ---------------------------------------------------------------- bad input


BAD = [json.dumps({"text": "good"}), '{"txt": "x"}', json.dumps({"text": "fine"}), '{"text": 1}']


@pytest.mark.parametrize("workers", [1, 2])
def test_fail_names_the_line_and_leaves_nothing(
    config: Callable[..., PrepConfig], tmp_path: Path, workers: int
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("\n".join(BAD))
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    wanted = config(source={"paths": paths}, workers=workers)
    with raises_error("record.rejected", "jsonl:2", "text", "txt"):
        prepare(wanted)
    assert not wanted.out.exists()


def test_quarantine(config: Callable[..., PrepConfig], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(BAD))
    wanted = config(source={"paths": [str(tmp_path / "a.jsonl")]}, on_error="quarantine")
    result = prepare(wanted)
    assert (result["documents"], result["rejected"]) == (2, 2)
    rejects = [json.loads(line) for line in (wanted.out / "rejects.jsonl").open()]
    assert [(reject["file"], reject["line"]) for reject in rejects] == [
        (str(tmp_path / "a.jsonl"), 2),
        (str(tmp_path / "a.jsonl"), 4),
    ]
    assert rejects[1]["byte_offset"] == len("\n".join(BAD[:3])) + 1
    assert "found a number" in rejects[1]["reason"]
    with raises_error("prep.rejects"):
        prepare(config(source=wanted.source.model_dump()))


def test_hopeless_input_ends_the_run(config: Callable[..., PrepConfig], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(BAD * 60))
    source = {"paths": [str(tmp_path / "a.jsonl")]}
    problem = ("prep.too_many_rejects", "120", "240", "max_reject", "a.jsonl:2", "text")
    with raises_error(*problem):
        prepare(config(source=source, on_error="quarantine"))
    tolerant = config(source=source, on_error="quarantine", max_reject_fraction=0.5)
    assert prepare(tolerant)["rejected"] == 120


def test_text_that_cannot_be_encoded_is_a_bad_line(
    config: Callable[..., PrepConfig], tmp_path: Path
) -> None:
    paths = shards(tmp_path / "in", [["good", " " * 2_000_000, "fine"]])
    with raises_error("record.rejected", "00.jsonl.zst:2"):
        prepare(config(source={"paths": paths}))
    result = prepare(config(source={"paths": paths}, on_error="quarantine"))
    assert (result["documents"], result["rejected"]) == (2, 1)


def test_no_documents(config: Callable[..., PrepConfig], tmp_path: Path) -> None:
    paths = shards(tmp_path / "in", [["", ""], ["text"]])
    with raises_error("prep.no_documents"):
        prepare(config(source={"paths": paths[:1]}))
    assert not (tmp_path / "out").exists()
    result = prepare(config(source={"paths": paths}))
    assert (result["documents"], result["empty"]) == (1, 2)
    (tmp_path / "nothing.jsonl").touch()
    nothing = {"paths": [str(tmp_path / "nothing.jsonl")]}
    with raises_error("prep.no_documents"):
        prepare(config(source=nothing, out=tmp_path / "n"))
    with raises_error("prep.nothing_to_train_on"):
        prepare(
            config(source={"paths": paths}, validation={"fraction": 0.9999999}, out=tmp_path / "v")
        )
    assert not (tmp_path / "v").exists()


def test_a_fraction_that_holds_out_nothing_is_told(
    config: Callable[..., PrepConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"source": {"paths": shards(tmp_path / "in", [["text", "another"]])}}
    prepare(config(**keys, validation={"fraction": 0.0001}))
    assert "validation.fraction=0.0001 held out none of 2 documents" in capsys.readouterr().err
    prepare(config(**keys, out=tmp_path / "none"))  # fraction 0: none was wanted
    assert "held out none" not in capsys.readouterr().err


def test_a_full_disk_is_told_and_leaves_nothing(config: Callable[..., PrepConfig]) -> None:
    """Limits the file size to zero, which behaves like a full disk."""
    wanted = config()
    code = (
        "import resource, sys\n"
        "from leviathan.config.data import PrepConfig\n"
        "from leviathan.data.prepare import prepare\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
        "prepare(PrepConfig.model_validate_json(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, wanted.model_dump_json()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"DataError: preparing {wanted.out} stopped: " in done.stderr
    assert not wanted.out.exists()


def test_a_damaged_work_folder_is_told(config: Callable[..., PrepConfig]) -> None:
    wanted = config()
    (wanted.out / ".prep").mkdir(parents=True)
    (wanted.out / ".prep/config.json").write_text("[")
    with raises_error("prep.corrupt", "config.json"):
        prepare(wanted)
