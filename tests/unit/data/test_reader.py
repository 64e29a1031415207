"""All compressions of the same lines give the same documents; errors name the line."""

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from errors import raises_error

from leviathan.data.prepare.readers import read
from leviathan.data.prepare.records import NO_SUBSET, Document, RecordSchema, RejectedRecord
from leviathan.data.prepare.sources import FileSource, find_inputs

TEXTS = [f"document {number}: été 中文 {'x' * number}" for number in range(50)]
LINES = [json.dumps({"text": t, "meta": {"pile_set_name": f"s{len(t) % 3}"}}) for t in TEXTS]
PLAIN = ("\n".join(LINES) + "\n").encode()


def zst(*frames: bytes, **options: object) -> bytes:
    compressor = zstandard.ZstdCompressor(**options)  # pyright: ignore[reportArgumentType]
    return b"".join(compressor.compress(frame) for frame in frames)


def skippable(content: bytes) -> bytes:
    return b"\x53\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content


def documents(path: Path) -> list[Document]:
    items = list(read(FileSource(path)))
    assert not [item for item in items if isinstance(item, RejectedRecord)]
    return [item for item in items if isinstance(item, Document)]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


PACKINGS: dict[str, Callable[[], bytes]] = {
    "plain": lambda: PLAIN,
    "no final newline": lambda: PLAIN[:-1],
    "crlf and blank lines": lambda: PLAIN.replace(b"\n", b"\r\n\r\n"),
    "bom": lambda: b"\xef\xbb\xbf" + PLAIN,
    "gz": lambda: gzip.compress(PLAIN),
    "gz of two members": lambda: gzip.compress(PLAIN[:999]) + gzip.compress(PLAIN[999:]),
    "zst": lambda: zst(PLAIN),
    "zst of many frames": lambda: zst(*(PLAIN[i : i + 333] for i in range(0, len(PLAIN), 333))),
    "zst with skippable frames": lambda: skippable(b"x") + zst(PLAIN) + skippable(b"y" * 70),
    "zst with an empty frame": lambda: zst(PLAIN[:100], b"", PLAIN[100:]),
    "zst with an empty frame first": lambda: zst(b"", PLAIN),
    "zst of frames with checksums": lambda: zst(PLAIN[:99], PLAIN[99:], write_checksum=True),
    "zst of frames without sizes": lambda: zst(PLAIN[:99], PLAIN[99:], write_content_size=False),
    "skippable frame between": lambda: zst(PLAIN[:99]) + skippable(b"z" * 300) + zst(PLAIN[99:]),
    "gz with zeros after": lambda: gzip.compress(PLAIN) + b"\0" * 512,
    "zst with a bom": lambda: zst(b"\xef\xbb\xbf" + PLAIN),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".gz"])
def test_packings_and_names_do_not_matter(tmp_path: Path, packing: str, suffix: str) -> None:
    found = documents(write(tmp_path / f"file{suffix}", PACKINGS[packing]()))
    assert [document.text for document in found] == TEXTS
    assert [document.subset for document in found] == [f"s{len(text) % 3}" for text in TEXTS]


def test_long_windows_and_large_lines(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(1 << 22).hex()
    line = json.dumps({"text": noise + noise}).encode() + b"\n"
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=30)
    path = write(tmp_path / "long.zst", zst(line, compression_params=parameters))
    assert documents(path)[0].text == noise + noise


def test_parquet(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in LINES]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    found = documents(path)
    assert [document.text for document in found] == TEXTS
    assert found[0].subset == "s1"
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"]}), path)
    with raises_error("source.no_column", "text"):
        documents(path)
    write(path, path.read_bytes()[:-9])
    with raises_error("source.corrupt"):
        documents(path)
    table = pyarrow.table({"text": ["needle in a column"] * 3})
    pyarrow.parquet.write_table(table, path, compression="none", write_page_checksum=True)
    assert b"needle" in path.read_bytes()
    write(path, path.read_bytes().replace(b"needle", b"noodle"))
    with raises_error("source.corrupt"):
        documents(path)


def test_offsets_lead_to_the_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n"))
    content = path.read_bytes()
    for document in documents(path):
        line = content[document.byte_offset :].split(b"\n")[0].removeprefix(b"\xef\xbb\xbf")
        assert json.loads(line)["text"] == document.text
        assert TEXTS[document.line - 1] == document.text


@pytest.mark.parametrize("cut", [1, 4, 5, 9, 100, 400, -1, -3, -4, -5])
def test_truncated_zst(tmp_path: Path, cut: int) -> None:
    content = zst(PLAIN[:1000], PLAIN[1000:], write_checksum=True)
    path = write(tmp_path / "cut.jsonl.zst", content[:cut])
    # Fewer than four bytes are not recognizable as zstd.
    with raises_error("source.corrupt" if cut in range(1, 4) else "source.truncated", path):
        list(read(FileSource(path)))


def test_damaged_zst(tmp_path: Path) -> None:
    content = bytearray(zst(PLAIN, write_checksum=True))
    content[-2] ^= 1
    with raises_error("source.corrupt", "a.zst"):
        list(read(FileSource(write(tmp_path / "a.zst", bytes(content)))))
    first = bytearray(zst(PLAIN[:999], write_checksum=True))
    first[-1] ^= 1
    with raises_error("source.corrupt", "c.zst"):
        list(read(FileSource(write(tmp_path / "c.zst", bytes(first) + zst(PLAIN[999:])))))
    with raises_error("source.corrupt", "b.zst"):
        list(read(FileSource(write(tmp_path / "b.zst", zst(PLAIN) + b"garbage after the end"))))


def test_damaged_gz(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(PLAIN))
    content[-6] ^= 1
    for name, packed in [
        ("a.gz", bytes(content)),
        ("b.gz", gzip.compress(PLAIN) + b"garbage after the end"),
        ("c.gz", gzip.compress(PLAIN)[:60] + b"\xff" * 99 + gzip.compress(PLAIN)[159:]),
    ]:
        with raises_error("source.corrupt", name):
            list(read(FileSource(write(tmp_path / name, packed))))


@pytest.mark.parametrize("cut", [3, 12, 200, -1, -8])
def test_truncated_gz(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "cut.jsonl.gz", gzip.compress(PLAIN)[:cut])
    with raises_error("source.truncated", "cut.jsonl.gz"):
        list(read(FileSource(path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            ("source.corrupt", "LFS"),
        ),
        ("a.jsonl.zst", b"version https://git-lfs.github.com/spec/v1\n", ("source.corrupt",)),
        ("a.jsonl.gz", b"\n<!DOCTYPE html><html>404</html>", ("source.corrupt", "HTML")),
        ("a.jsonl", '{"text": "x"}'.encode("utf-16"), ("source.corrupt", "UTF-16")),
        ("a.jsonl", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ("source.corrupt",)),
        ("a.jsonl.zst", b"hello", ("source.corrupt",)),
    ],
)
def test_other_files_are_called_what_they_are(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with raises_error(*message):
        list(read(FileSource(write(tmp_path / name, content))))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"content": "x", "url": 1}', "no key 'text' (keys found: 'content', 'url')"),
        (b"{}", "no key 'text' (keys found: none)"),
        (b'{"text": null}', "'text' must be a string, found null"),
        (b'{"text": 12345}', "'text' must be a string, found a number"),
        (b'{"text": true}', "'text' must be a string, found a boolean"),
        (b'{"text": ["a"]}', "'text' must be a string, found a list"),
        (b'{"text": {"a": 1}}', "'text' must be a string, found an object"),
        (b'["text"]', "expected an object with the key 'text', found a list"),
        (b'{"text": "caf\xe9 \x96"}', "invalid UTF-8: byte 0xe9 at position 13 of the line"),
        (b'{"text": "cut', "not JSON (Unterminated string"),
        (b'{"text": "a"} {"text": "b"}', "not JSON (Extra data"),
        (b'{"text": "\\ud800"}', "lone surrogate U+D800"),
        (b'{"text": "a\\udfffb"}', "lone surrogate U+DFFF at character 1"),
        (b'{"text": "\\ude00\\ud83d"}', "lone surrogate U+DE00"),
        (b'{"text": "a\tb"}', "not JSON (Invalid control character"),
        (b'\xef\xbb\xbf{"text": "bom amidst"}', "not JSON (Unexpected UTF-8 BOM"),
        (b'"text"', "expected an object with the key 'text', found a text"),
        (b"[" * 200_000, "not JSON (maximum recursion depth"),
        (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "not JSON (Exceeds the limit"),
    ],
)
def test_bad_lines(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "bad.jsonl", LINES[0].encode() + b"\n" + line + b"\n" + PLAIN)
    items = list(read(FileSource(path)))
    bad = [item for item in items if isinstance(item, RejectedRecord)]
    assert len(items) == len(LINES) + 2
    assert [(item.line, item.byte_offset) for item in bad] == [(2, len(LINES[0]) + 1)]
    assert reason in bad[0].reason
    assert bad[0].message(FileSource(path)).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "x", "score": NaN, "most": Infinity, "huge": 1e999}',
        b'{"text": "x", "n": ' + b"9" * 4000 + b"}",
        b'{"text": "first", "text": "x"}',
        b'{"text": "x", "deep": ' + b"[" * 900 + b"]" * 900 + b"}",
        b' \t{"text" : "\\u0078"} \r',
    ],
)
def test_lines_that_are_documents_all_the_same(tmp_path: Path, line: bytes) -> None:
    found = documents(write(tmp_path / "a.jsonl", PLAIN + line + b"\n" + PLAIN))
    assert found[len(LINES)].text == "x"
    assert len(found) == 2 * len(LINES) + 1


@pytest.mark.parametrize("text", ["a\0b", "\ufeffx", "<|endoftext|>", "\u2028\x85", "😀", " " * 99])
def test_any_character_is_kept(tmp_path: Path, text: str) -> None:
    """Escaped or not, and no line end but the line feed ends a line."""
    lines = [json.dumps({"text": text}), json.dumps({"text": text}, ensure_ascii=False)]
    found = documents(write(tmp_path / "a.jsonl", "\n".join(lines).encode()))
    assert [document.text for document in found] == [text, text]


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("size", [99, 100, 101, 102, 103, 104, 5000, 3 << 20])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_longer_lines_are_bad_lines(tmp_path: Path, size: int, end: bytes) -> None:
    line = json.dumps({"text": "x" * (size - 12)}).encode()
    assert len(line) == size
    good = b'{"text": "fine"}\n'
    path = write(tmp_path / "a.jsonl", good + line + end + (good if end else b""))
    items = list(read(FileSource(path), reading=RecordSchema(max_document_bytes=100)))
    assert len(items) == (3 if end else 2)
    assert isinstance(items[1], RejectedRecord) == (size > 100)
    assert (items[1].line, items[1].byte_offset) == (2, len(good))
    if isinstance(items[1], RejectedRecord):
        assert items[1].reason == "longer than 100 bytes; raise max_document_bytes"
    if end:
        assert isinstance(items[2], Document)
        assert (items[2].line, items[2].byte_offset) == (3, len(good) + size + len(end))


def test_longer_rows_are_bad_lines(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["é" * 50, "é" * 51, None, "x"], "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    items = list(
        read(FileSource(tmp_path / "a.parquet"), reading=RecordSchema(max_document_bytes=100))
    )
    assert [isinstance(item, RejectedRecord) for item in items] == [False, True, True, False]


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_memory_does_not_grow_with_a_line(tmp_path: Path, kind: str) -> None:
    """A file of some kilobytes that unpacks to one line of 600 MB, and then to good ones."""
    path = tmp_path / f"bomb.jsonl.{kind}"
    piece = b" " * (1 << 20)
    with path.open("wb") as file:
        if kind == "zst":
            packer = zstandard.ZstdCompressor(level=1).stream_writer(file, closefd=False)
        else:
            packer = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1)
        with packer as out:
            out.write(b'{"text": "')
            for _ in range(600):
                out.write(piece)
            out.write(b'"}\n' + PLAIN)
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from leviathan.data.prepare.readers import RejectedRecord, RecordSchema, read\n"
        "from leviathan.data.prepare.sources import FileSource\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "items = list(read(FileSource(Path(sys.argv[1])),"
        " reading=RecordSchema(max_document_bytes=1 << 24)))\n"
        "print(len(items), isinstance(items[0], RejectedRecord), round(peak() - before))\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, bad, grown = done.stdout.split()
    assert (int(count), bad) == (len(LINES) + 1, "True")
    assert int(grown) < 80  # MiB: the 16 MiB of a line that is still allowed, twice, and buffers


PARQUET_TYPES = {
    "string": pyarrow.string(),
    "large_string": pyarrow.large_string(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    "string_view": pyarrow.string_view(),
}


@pytest.mark.parametrize("kind", PARQUET_TYPES)
def test_parquet_types(tmp_path: Path, kind: str) -> None:
    texts = pyarrow.array(["one", None, "two", ""], PARQUET_TYPES[kind])
    metas = pyarrow.array([{"pile_set_name": "s", "n": 1}, None, {"pile_set_name": None}, None])
    table = pyarrow.table({"id": [1, 2, 3, 4], "text": texts, "meta": metas})
    pyarrow.parquet.write_table(table, tmp_path / "a.jsonl")  # whatever its name
    items = list(read(FileSource(tmp_path / "a.jsonl")))
    assert [item.text for item in items if isinstance(item, Document)] == ["one", "two", ""]
    assert [item.subset for item in items if isinstance(item, Document)] == ["s", *[NO_SUBSET] * 2]
    (bad,) = [item for item in items if isinstance(item, RejectedRecord)]
    assert (bad.line, bad.reason) == (2, "'text' must be a string, found null")
    table = pyarrow.table({"text": pyarrow.array([b"bytes"], pyarrow.binary())})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    (bad,) = read(FileSource(tmp_path / "b.parquet"))
    assert isinstance(bad, RejectedRecord)
    assert "found bytes" in bad.reason


@pytest.mark.parametrize("meta", ["null", "{}", '"x"', '{"pile_set_name": 3}', "[]"])
def test_documents_without_a_subset(tmp_path: Path, meta: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "x", "meta": {meta}}}'.encode())
    assert documents(path)[0].subset == NO_SUBSET


# ---------------------------------------------------------------- which files


def test_folders_and_globs_in_name_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["b/2.jsonl.zst", "10.jsonl", "9.gz", "a.parquet", "b/1.jsonl"]
    litter = ["MANIFEST.json", ".hidden.jsonl", "c.jsonl.part", "README.md", ".git/x.jsonl"]
    for name in reversed(names + litter):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    expected = ["10.jsonl", "9.gz", "a.parquet", "b/1.jsonl", "b/2.jsonl.zst"]

    def paths(*patterns: str) -> list[Path]:
        return [Path(source.name) for source in find_inputs(patterns)]

    found = paths(str(tmp_path))
    assert [path.relative_to(tmp_path).as_posix() for path in found] == expected
    assert (
        "ignored .hidden.jsonl, MANIFEST.json, README.md, c.jsonl.part" in capsys.readouterr().err
    )
    assert paths(f"{tmp_path}/**/*.jsonl*") == [found[0], *found[3:]]
    assert paths(str(found[3]), str(tmp_path)) == [found[3], *found[:3], found[4]]
    assert paths(str(tmp_path / "MANIFEST.json")) == [tmp_path / "MANIFEST.json"]


def test_nothing_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with raises_error("source.not_found"):
        find_inputs([str(tmp_path / "nowhere")])
    with raises_error("source.not_regular", "dev/null"):
        find_inputs(["/dev/null"])
    (tmp_path / "notes.txt").rename(tmp_path / "notes.tex")
    for pattern in (str(tmp_path), f"{tmp_path}/*.jsonl", f"{tmp_path}/*.tex"):
        with raises_error("source.not_found"):
            find_inputs([pattern])
