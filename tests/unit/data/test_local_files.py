"""Files of a directory, a glob or a list of paths: links, spellings and unusual names."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.data.mds import ShardReader
from leviathan.data.prepare import prepare
from leviathan.data.prepare.readers import read
from leviathan.data.prepare.records import Document
from leviathan.data.prepare.sources import find_inputs, find_splits
from leviathan.data.tokenizer import load_tokenizer, train_bpe

Config = Callable[..., PrepConfig]


def write(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": "s"}}) for text in texts]
    path.write_text("\n".join(lines) + "\n")
    return path


def texts_of(patterns: Sequence[str | Path]) -> list[str]:
    sources = find_inputs([str(pattern) for pattern in patterns])
    items = [item for source in sources for item in read(source)]
    return [item.text for item in items if isinstance(item, Document)]


def names(patterns: Sequence[str | Path]) -> list[str]:
    return [source.name for source in find_inputs([str(pattern) for pattern in patterns])]


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A corpus of three files, one of them in a directory that is a symbolic link."""
    corpus = tmp_path / "corpus"
    write(corpus / "a.jsonl", "a")
    write(corpus / "real/b.jsonl", "b")
    write(tmp_path / "elsewhere/deep/c.jsonl", "c")
    (corpus / "link").symlink_to(tmp_path / "elsewhere")
    return corpus


# ---------------------------------------------------------------- links


def test_linked_folders_are_read(linked: Path) -> None:
    expected = [f"{linked}/{name}" for name in ("a.jsonl", "link/deep/c.jsonl", "real/b.jsonl")]
    for pattern in (linked, f"{linked}/", f"{linked}/**/*.jsonl"):
        assert names([pattern]) == expected
        assert texts_of([pattern]) == ["a", "c", "b"]
    for pattern in (f"file://{linked}", f"file://{linked}/", f"file://{linked}/**/*.jsonl"):
        assert names([pattern]) == [f"file://{name}" for name in expected]


def test_linked_folders_are_prepared_as_their_glob(linked: Path, config: Config) -> None:
    results = [
        prepare(config(source={"paths": [pattern]}, out=linked.parent / f"out{number}"))
        for number, pattern in enumerate([str(linked), f"{linked}/**/*.jsonl"])
    ]
    assert results[0] == results[1]
    assert results[0]["documents"] == 3


@pytest.mark.parametrize("pattern", ["{}", "{}/**/*.jsonl", "file://{}"])
def test_links_that_lead_back_end(
    linked: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (linked / "up").symlink_to("..")
    (linked / "real/loop").symlink_to(".")
    (linked.parent / "elsewhere/back").symlink_to(linked)
    assert sorted(texts_of([pattern.format(linked)])) == ["a", "b", "c"]
    assert len(capsys.readouterr().err) < 2_000


def test_a_real_file_is_not_called_by_a_link(tmp_path: Path) -> None:
    """So that a link added to a corpus does not change the order of its files."""
    write(tmp_path / "in/z/x.jsonl", "x")
    write(tmp_path / "in/y.jsonl", "y")
    (tmp_path / "in/a").symlink_to("z")
    (tmp_path / "in/b.jsonl").symlink_to("y.jsonl")
    for pattern in (tmp_path / "in", f"{tmp_path}/in/**/*.jsonl"):
        assert names([pattern]) == [f"{tmp_path}/in/y.jsonl", f"{tmp_path}/in/z/x.jsonl"]


def test_a_link_gives_a_file_its_suffix(tmp_path: Path) -> None:
    """As in the Hub's cache: the file itself is called by its hash."""
    (write(tmp_path / "in/blobs/0.jsonl", "x")).rename(tmp_path / "in/blobs/0a1b2c")
    (tmp_path / "in/snapshot").mkdir()
    (tmp_path / "in/snapshot/train.jsonl").symlink_to("../blobs/0a1b2c")
    assert names([tmp_path / "in"]) == [f"{tmp_path}/in/snapshot/train.jsonl"]


@pytest.mark.parametrize("pattern", ["{}", "{}/*", "file://{}"])
def test_what_is_no_file_is_named(
    tmp_path: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in/a.jsonl", "a")
    (tmp_path / "in/b.jsonl").symlink_to("nowhere.jsonl")
    (tmp_path / "in/c.jsonl").symlink_to("c.jsonl")
    os.mkfifo(tmp_path / "in/d.jsonl")
    assert names([pattern.format(tmp_path / "in")])[0].endswith(f"{tmp_path}/in/a.jsonl")
    messages = capsys.readouterr().err
    assert f"{tmp_path}/in/b.jsonl (a broken link to nowhere.jsonl)" in messages
    assert f"{tmp_path}/in/c.jsonl (a broken link to c.jsonl)" in messages
    assert f"{tmp_path}/in/d.jsonl (not a regular file)" in messages
    with raises_error("source.broken_link", "b.jsonl", "nowhere.jsonl"):
        find_inputs([str(tmp_path / "in/b.jsonl")])


def test_a_folder_that_cannot_be_read_is_named(
    linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_folder = os.scandir

    def scandir(path: str | Path) -> object:
        if Path(path).name == "real":
            raise PermissionError(13, "Permission denied")
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for pattern in (linked, f"{linked}/**/*.jsonl"):
        with raises_error("source.unreadable", "corpus/real"):
            find_inputs([str(pattern)])


# ---------------------------------------------------------------- spellings


def test_one_file_under_several_spellings_is_read_once(
    linked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(linked)
    (linked / "other.jsonl").symlink_to("a.jsonl")
    spellings = ["a.jsonl", f"{linked}/a.jsonl", "./a.jsonl", "real/../a.jsonl", "other.jsonl"]
    assert names([*spellings, f"file://{linked}/a.jsonl"]) == ["a.jsonl"]
    messages = capsys.readouterr().err
    assert f"{linked}/a.jsonl (as a.jsonl)" in messages
    assert "other.jsonl (as a.jsonl)" in messages
    assert "listed twice and read once" in messages
    assert names([f"file://{linked}/a.jsonl", f"file://localhost{linked}/a.jsonl"][:1]) == [
        f"file://{linked}/a.jsonl"
    ]
    assert names([f"{linked}/real", linked / "real/b.jsonl"]) == [f"{linked}/real/b.jsonl"]
    assert f"warning: {linked}/real/b.jsonl is listed twice" in capsys.readouterr().err


def test_one_url_under_several_spellings_is_read_once() -> None:
    import fsspec

    fsspec.filesystem("memory").pipe("/spelled/a.jsonl", b'{"text": "a"}\n')
    spellings = ["memory://spelled/a.jsonl", "memory:///spelled/a.jsonl", "memory://spelled"]
    assert names(spellings) == ["memory://spelled/a.jsonl"]


def test_held_out_files_are_known_under_any_spelling(
    linked: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    (linked / "held").symlink_to("real")
    wanted = config(
        source={"paths": [str(linked)]}, validation={"paths": [f"file://{linked}/held/b.jsonl"]}
    )
    found = [(Path(source.name).name, split) for source, split in find_splits(wanted)]
    assert found == [("a.jsonl", "train"), ("c.jsonl", "train"), ("b.jsonl", "val")]
    messages = capsys.readouterr().err
    assert f"{linked}/real/b.jsonl (as file://{linked}/held/b.jsonl) is held out" in messages


def test_a_text_file_of_a_folder_can_be_held_out(tmp_path: Path, config: Config) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    for name in ("one", "two", "three"):
        (folder / f"{name}.txt").write_text(name)
    wanted = config(
        source={"paths": [str(folder)]}, validation={"paths": [str(folder / "two.txt")]}
    )
    assert prepare(wanted)["documents"] == 3
    decode = load_tokenizer(wanted.out).decode
    splits = {name: decode(ShardReader(wanted.out / name)[0].tokens) for name in ("train", "val")}
    assert "two" not in splits["train"]
    assert splits["val"].startswith("two<|endoftext|>")
    assert prepare(wanted)["documents"] == 3  # complete


# ---------------------------------------------------------------- names


def test_a_name_that_is_not_utf8_is_refused_before_the_work(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    write(folder / "a.jsonl", "a")
    odd = os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jsonl")
    Path(odd).write_bytes((folder / "a.jsonl").read_bytes())
    for pattern in (str(folder), f"{folder}/*.jsonl", odd, f"file://{folder}"):
        with raises_error("source.name_not_utf8", "in/caf\\xe9.jsonl"):
            find_inputs([pattern])
    with raises_error("source.name_not_utf8"):
        train_bpe([str(folder)], 300, tmp_path / "t.tiktoken")
    wanted = config(source={"paths": [str(folder)]})
    with raises_error("source.name_not_utf8"):
        prepare(wanted)
    assert not wanted.out.exists()
    Path(odd).rename(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.notes"))
    assert names([folder]) == [f"{folder}/a.jsonl"]
    assert "ignored caf\\xe9.notes" in capsys.readouterr().err
