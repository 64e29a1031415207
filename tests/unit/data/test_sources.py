"""Sources of a corpus: directories of texts, URLs, Hub datasets; and the selection of subsets."""

import gzip
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.data.encoders import GigatokenEncoder
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import ShardReader
from leviathan.data.prepare import prepare
from leviathan.data.prepare.hub import HubSource
from leviathan.data.prepare.readers import read, record_schema
from leviathan.data.prepare.records import Document, RecordSchema, RejectedRecord
from leviathan.data.prepare.sources import FileSource, Source, find_inputs, find_splits
from leviathan.data.tokenizer import load_tokenizer
from leviathan.errors import ConfigError

Config = Callable[..., PrepConfig]


@pytest.fixture
def config(tiny_tokenizer: Path, tmp_path: Path) -> Config:
    def build(source: dict[str, Any], **changes: Any) -> PrepConfig:
        keys = {
            "source": source,
            "validation": {"fraction": 0},
            "tokenizer": str(tiny_tokenizer),
            "seq_len": 16,
            "out": tmp_path / "out",
        }
        return PrepConfig.model_validate(keys | changes)

    return build


def stream_of(out: Path) -> str:
    rows = list(ShardReader(out / "train"))
    ids = [rows[0].tokens[:1], *(row.tokens[1 : row.n_valid] for row in rows)]
    return load_tokenizer(out).decode(np.concatenate(ids))


def texts_in(source: Source, reading: RecordSchema | None = None) -> list[str]:
    items = list(read(source, reading=reading))
    assert not [item for item in items if isinstance(item, RejectedRecord)], items
    return [item.text for item in items if isinstance(item, Document)]


def jsonl(*texts: str, subset: str = "s") -> bytes:
    lines = [json.dumps({"text": t, "meta": {"pile_set_name": subset}}) + "\n" for t in texts]
    return "".join(lines).encode()


# ---------------------------------------------------------------- plain text


def test_a_folder_of_texts_is_one_task(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    for name, text in [("b.txt", b"two\r\n"), ("a.md", b"\xef\xbb\xbfone"), ("more/c.txt", b"x y")]:
        (folder / name).write_bytes(text)
    (folder / ".hidden.txt").write_text("no")
    (folder / "packed.txt").write_bytes(gzip.compress(b"three"))
    found = find_inputs([str(folder)])
    assert [source.name for source in found] == [str(folder), f"{folder}/more/c.txt"]
    assert texts_in(found[0]) == ["one", "two\r\n", "three"]
    assert found[0].size() == sum((folder / n).stat().st_size for n in ("a.md", "b.txt")) + len(
        gzip.compress(b"three")
    )
    assert [source.name for source in find_inputs([f"{folder}/b.txt"])] == [f"{folder}/b.txt"]
    wanted = config({"paths": [str(folder)], "default_subset": "books"})
    result = prepare(wanted)
    assert (result["documents"], result["subsets"]) == (4, ["books"])
    assert stream_of(wanted.out) == "".join(
        f"{text}<|endoftext|>" for text in ("one", "two\r\n", "three", "x y")
    )
    stamp = found[0].stamp()
    (folder / "b.txt").write_bytes(b"two!\n")
    assert found[0].stamp() != stamp


def test_texts_beside_shards_are_their_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "a.jsonl").write_bytes(jsonl("x"))
    assert [source.name for source in find_inputs([str(tmp_path)])] == [str(tmp_path / "a.jsonl")]
    assert "ignored README.md" in capsys.readouterr().err


def test_bad_texts_are_bad_lines(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "1.txt").write_text("good")
    (folder / "2.txt").write_bytes(b"caf\xe9")
    (folder / "3.txt").write_bytes("wide".encode("utf-16"))
    (folder / "4.txt").write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "5.txt").write_text("l" * 3_000)
    wanted = config({"paths": [str(folder)]}, max_document_bytes=2_000)
    with raises_error("record.rejected", "in/2.txt", "0xe9"):
        prepare(wanted)
    wanted = config({"paths": [str(folder)]}, max_document_bytes=2_000, on_error="quarantine")
    assert prepare(wanted)["rejected"] == 4
    rejects = [json.loads(line) for line in (wanted.out / "rejects.jsonl").open()]
    assert [reject["file"] for reject in rejects] == [f"{folder}/{n}.txt" for n in (2, 3, 4, 5)]
    reasons = [reject["reason"] for reject in rejects]
    for reason, part in zip(reasons, ("UTF-8", "UTF-16", "LFS", "longer than 2,000"), strict=True):
        assert part in reason


# ---------------------------------------------------------------- URLs


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(jsonl("plain"))
    (folder / "b.zst").write_bytes(zstandard.ZstdCompressor().compress(jsonl("packed")))
    (folder / "misnamed.jsonl").write_bytes(gzip.compress(jsonl("misnamed")))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["columns"]}), folder / "deep/c.parquet")
    (folder / "notes.doc").write_text("litter")
    return folder


@pytest.fixture
def server(corpus: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(corpus))) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


EVERYTHING = ["plain", "packed", "columns", "misnamed"]


def test_file_urls(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = find_inputs([f"file://{corpus}"])
    assert "ignored notes.doc" in capsys.readouterr().err
    assert [text for source in found for text in texts_in(source)] == EVERYTHING
    assert [source.size() for source in found[:1]] == [(corpus / "a.jsonl").stat().st_size]
    assert len(find_inputs([f"file://{corpus}/*.jsonl"])) == 2
    stamp = found[0].stamp()
    (corpus / "a.jsonl").write_bytes(jsonl("other"))
    assert find_inputs([f"file://{corpus}/a.jsonl"])[0].stamp() != stamp


def test_http(server: str, corpus: Path) -> None:
    names = ["a.jsonl", "b.zst", "deep/c.parquet", "misnamed.jsonl"]
    found = find_inputs([f"{server}/{name}" for name in names])
    assert [source.name for source in found] == [f"{server}/{name}" for name in names]
    assert [text for source in found for text in texts_in(source)] == EVERYTHING
    listed = find_inputs([f"{server}/"])
    assert {source.name for source in listed} >= {f"{server}/a.jsonl", f"{server}/b.zst"}
    with raises_error("source.not_found", "nowhere.jsonl"):
        find_inputs([f"{server}/nowhere.jsonl"])
    (corpus / "page.zst").write_text("<!DOCTYPE html><html>sign in</html>")
    with raises_error("source.corrupt", "HTML"):
        texts_in(find_inputs([f"{server}/page.zst"])[0])
    with raises_error("url.unreachable", "9/folder"):
        find_inputs(["http://127.0.0.1:9/folder/"])
    with raises_error("source.not_found", "127.0.0.1:9/x.jsonl"):
        find_inputs(["http://127.0.0.1:9/x.jsonl"])


def test_urls_prepare_to_the_same_data_as_files(
    config: Config, server: str, corpus: Path, tmp_path: Path
) -> None:
    fingerprints = set()
    for number, root in enumerate([str(corpus), server, f"file://{corpus}"]):
        paths = [f"{root}/a.jsonl", f"{root}/b.zst", f"{root}/deep/c.parquet"]
        wanted = config({"paths": paths}, out=tmp_path / f"o{number}", workers=2)
        fingerprints.add(prepare(wanted)["fingerprint"])
        hashes = [source.sha256 for source in DatasetInfo.load(wanted.out).sources]
        assert len(set(hashes)) == 3
        assert prepare(wanted)["documents"] == 3  # complete
    assert len(fingerprints) == 1


def test_a_download_that_ends_early(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/early/a.jsonl", jsonl("one", "two"))
    (source,) = find_inputs(["memory://early/a.jsonl"])
    assert texts_in(source) == ["one", "two"]
    memory.pipe("/early/a.jsonl", jsonl("one"))
    with raises_error("source.unreadable", "memory://early/a.jsonl"):
        texts_in(source)


def test_a_missing_file_system_is_named() -> None:
    with raises_error("url.unknown_protocol"):
        find_inputs(["nosuch://bucket/a.jsonl"])
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with raises_error("url.missing_package", "leviathan[s3]"):
            find_inputs(["s3://bucket/a.jsonl"])


# ---------------------------------------------------------------- the Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local directory like a Hub dataset: three training shards, one for validation."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    folder.mkdir()
    for shard in range(3):
        rows = [
            {"body": f"text {shard} {row}", "info": {"kind": "web" if row % 2 else "book"}}
            for row in range(4)
        ]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / f"train-{shard:05}-of-00003.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"body": ["held out"]}), folder / "validation-00000-of-00001.parquet"
    )
    return folder


def test_hub_data_sets(config: Config, hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"id": str(hub), "text_column": "body", "subset_column": "info.kind"}
    wanted = config({"hub": keys})
    found = [source for source, _ in find_splits(wanted)]
    assert [source.name.partition("shard ")[2] for source in found] == [
        f"{shard:05}-of-00003" for shard in range(3)
    ]
    for shard, source in enumerate(pickle.loads(pickle.dumps(found))):
        assert texts_in(source, record_schema(source, wanted)) == [
            f"text {shard} {row}" for row in range(4)
        ]
    result = prepare(wanted)
    assert (result["documents"], result["subsets"]) == (12, ["book", "web"])
    assert stream_of(wanted.out).startswith("text 0 0<|endoftext|>text 0 1<|endoftext|>")
    capsys.readouterr()
    assert prepare(wanted) == result
    assert "is complete" in capsys.readouterr().err


def test_hub_validation_and_mistakes(config: Config, hub: Path, tmp_path: Path) -> None:
    keys = {"id": str(hub), "text_column": "body"}
    held_out = {"hub": keys | {"split": "validation"}}
    result = prepare(config({"hub": keys}, validation=held_out))
    assert result["splits"]["val"]["documents"] == 1
    assert result["splits"]["train"]["documents"] == 12
    for change, message in [
        ({"text_column": "text"}, ("hub.no_column", "text")),
        ({"split": "test"}, ("hub.not_loaded", "test")),
        ({"id": str(tmp_path / "nowhere")}, ("hub.not_loaded",)),
    ]:
        with raises_error(*message):
            find_splits(config({"hub": keys | change}))


def test_a_hub_data_set_that_changes_is_noticed(config: Config, hub: Path) -> None:
    keys = {"id": str(hub), "text_column": "body"}
    (source, *_) = [source for source, _ in find_splits(config({"hub": keys}))]
    assert isinstance(source, HubSource)
    rows = pyarrow.table({"body": ["changed, and longer than it was"] * 9})
    pyarrow.parquet.write_table(rows, hub / "train-00000-of-00003.parquet")
    with raises_error("hub.changed"):
        texts_in(source, RecordSchema(text_key="body"))


def test_hub_or_paths(config: Config) -> None:
    with pytest.raises(ValueError, match="paths and hub exclude each other"):
        config({"paths": ["x"], "hub": {"id": "y"}})
    with pytest.raises(ValueError, match="no input"):
        config({})
    assert issubclass(ConfigError, Exception)


# ---------------------------------------------------------------- keys and subsets


def test_other_keys(config: Config, tmp_path: Path) -> None:
    lines = [{"doc": {"content": f"c{n}"}, "lang": {"code": "en" if n else 7}} for n in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    keys = {"text_key": "doc.content", "subset_key": "lang.code", "default_subset": "none"}
    wanted = config({"paths": [str(tmp_path / "a.jsonl")], **keys})
    assert prepare(wanted)["subsets"] == ["en", "none"]
    assert stream_of(wanted.out) == "c0<|endoftext|>c1<|endoftext|>"
    (tmp_path / "b.jsonl").write_text('{"doc": "x"}')
    with raises_error("record.rejected", "b.jsonl:1", "doc.content"):
        prepare(config({"paths": [str(tmp_path / "b.jsonl")], **keys}, out=tmp_path / "b"))


def test_subsets_can_be_left_out(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = tmp_path / "a.jsonl"
    shard.write_bytes(
        jsonl("free 1", subset="Wikipedia (en)")
        + jsonl("copied", "copied too", subset="Books3")
        + jsonl("free 2", subset="ArXiv")
    )
    exclude = {"exclude": ["Books3", "BookCorpus2", "wikipedia (en)"]}
    wanted = config({"paths": [str(shard)], "subsets": exclude})
    result = prepare(wanted)
    assert (result["documents"], result["subsets"]) == (2, ["ArXiv", "Wikipedia (en)"])
    assert DatasetInfo.load(wanted.out).sources[0].excluded == 2
    messages = capsys.readouterr().err
    assert "no document is in 'wikipedia (en)'; did you mean 'Wikipedia (en)'?" in messages
    assert "no document is in 'BookCorpus2'" in messages
    assert "'Books3'" not in messages
    only = {"include": "ArXiv"}
    wanted = config({"paths": [str(shard)], "subsets": only}, out=tmp_path / "only")
    assert prepare(wanted)["subsets"] == ["ArXiv"]
    with raises_error("prep.no_documents", "source.subsets"):
        prepare(config({"paths": [str(shard)], "subsets": {"include": "X"}}, out=tmp_path / "none"))
    with pytest.raises(ValueError, match="include and exclude exclude each other"):
        config({"paths": ["a"], "subsets": {"include": "a", "exclude": "b"}})


# ---------------------------------------------------------------- backends


def test_the_backend_changes_no_byte(config: Config, tiny_corpus: Path, tmp_path: Path) -> None:
    found = []
    for backend in ("gigatoken", "tiktoken", "auto"):
        wanted = config({"paths": [str(tiny_corpus)]}, backend=backend, out=tmp_path / backend)
        result = prepare(wanted)
        found.append((result, (wanted.out / "dataset.json").read_bytes()))
    assert found[0] == found[1] == found[2]
    assert prepare(config({"paths": [str(tiny_corpus)]}, backend="tiktoken", out=tmp_path / "auto"))


def test_a_mismatch_sends_the_whole_file_to_tiktoken(
    config: Config,
    tiny_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = prepare(config({"paths": [str(tiny_corpus)]}, backend="tiktoken", out=tmp_path / "good"))
    exact = GigatokenEncoder.encode

    def wrong(self: GigatokenEncoder, text: str, content: bytes | None = None) -> np.ndarray:
        ids = exact(self, text, content)
        return ids[::-1] if text.startswith('"""Text wrapping') else ids

    monkeypatch.setattr(GigatokenEncoder, "encode", wrong)
    wanted = config({"paths": [str(tiny_corpus)]})
    assert prepare(wanted) == good
    messages = capsys.readouterr().err
    assert "00.jsonl: the ids that gigatoken gives for line" in messages
    mismatches = [s.backend_mismatches for s in DatasetInfo.load(wanted.out).sources]
    assert mismatches == [1, 0]


def test_a_file_changed_while_it_is_read(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl("x"))
    source = FileSource(path)
    stamps = iter(["before", "after"])

    class Changing(FileSource):
        def stamp(self) -> str:
            return next(stamps)

    from leviathan.data.prepare.tokenize import TokenizeTask, tokenize

    load_tokenizer(config({"paths": ["x"]}).tokenizer).save(tmp_path / "tokenizer")
    task = TokenizeTask(
        source=Changing(source.path),
        split="train",
        part=tmp_path / "part",
        tokenizer=tmp_path / "tokenizer",
        fraction=0,
        quarantine=False,
        threads=1,
    )
    with raises_error("source.changed", "a.jsonl"):
        tokenize(task, lambda amount: None)
    assert not list(tmp_path.glob("part*"))
