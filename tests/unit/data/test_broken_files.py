"""Corpus files with defects, each with its expected outcome."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broken_files import write_collection
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.mds import ShardReader
from leviathan.data.prepare import prepare
from leviathan.data.tokenizer import load_tokenizer

SAME_20 = ["reference.jsonl.zst", "same20.plain.jsonl", "same20.jsonl.gz", "same20.parquet"]

Run = Callable[..., tuple[dict[str, Any], np.ndarray, Path]]


@dataclass(frozen=True)
class Collection:
    """Corpus files with defects, their expected outcomes, and a tokenizer."""

    folder: Path
    expected: dict[str, dict[str, Any]]
    tokenizer: str
    end_of_text: int


@pytest.fixture(scope="session")
def generated(
    tiny_corpus: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Collection:
    """The collection with the small tokenizer."""
    folder = tmp_path_factory.mktemp("broken") / "files"
    lines = [line for file in sorted(tiny_corpus.iterdir()) for line in file.open()]
    tokenizer = load_tokenizer(tiny_tokenizer)
    cases = write_collection(folder, [json.loads(line)["text"] for line in lines], tokenizer)
    return Collection(
        folder, {case["file"]: case for case in cases}, str(tiny_tokenizer), tokenizer.end_of_text
    )


@pytest.fixture(params=["generated", "shared"])
def collection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Collection:
    """The generated collection, and the shared one with o200k_base if it is available."""
    if request.param == "generated":
        return request.getfixturevalue("generated")
    shared = request.getfixturevalue("shared")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data/tiktoken_cache"))
    folder = shared / "data/broken"
    cases = json.loads((folder / "EXPECTED.json").read_bytes())
    for case in cases:
        case["tokens"] = case.get("o200k_tokens_without_eot")
    return Collection(folder, {case["file"]: case for case in cases}, "o200k_base", 199_999)


@pytest.fixture
def broken(collection: Collection) -> Path:
    return collection.folder


@pytest.fixture
def expected(collection: Collection) -> dict[str, dict[str, Any]]:
    return collection.expected


@pytest.fixture
def run(collection: Collection, tmp_path: Path) -> Run:
    """Prepares files of the collection: (summary, id stream, directory)."""

    def run(*files: str | Path, **changes: Any) -> tuple[dict[str, Any], np.ndarray, Path]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        keys = {
            "source": {"paths": [str(collection.folder / file) for file in files]},
            "validation": {"fraction": 0},
            "tokenizer": collection.tokenizer,
            "out": out,
        }
        result = prepare(PrepConfig.model_validate(keys | changes))
        rows = list(ShardReader(out / "train"))
        pieces = [rows[0].tokens[:1], *(row.tokens[1 : row.n_valid] for row in rows)]
        return result, np.concatenate(pieces), out

    return run


@pytest.mark.parametrize("file", SAME_20[1:])
def test_same_documents_in_any_packing(run: Run, expected: dict[str, Any], file: str) -> None:
    reference = run(SAME_20[0])
    found = run(file)
    assert np.array_equal(reference[1], found[1])
    assert reference[0]["fingerprint"] == found[0]["fingerprint"]
    case = expected[SAME_20[0]]
    assert reference[0]["documents"] == case["good_documents"]
    assert reference[0]["tokens"] == case["tokens"] + 20
    if first := case.get("o200k_first_document_first_20_ids"):
        assert reference[1][:20].tolist() == first


@pytest.mark.parametrize(
    "file",
    [
        "empty_texts.jsonl.zst",
        "one_line_5mb.jsonl.zst",
        "crlf_no_final_newline.jsonl",
        "utf8_bom.jsonl.zst",
        "special_token_strings.jsonl.zst",
        "duplicate/00.jsonl.zst",
    ],
)
def test_valid_files(run: Run, collection: Collection, file: str) -> None:
    (result, ids, out), case = run(file), collection.expected[file]
    ends = int((ids == collection.end_of_text).sum())
    assert ends == result["documents"]
    assert result["tokens"] - ends == case["tokens"]
    assert result["documents"] + result["empty"] == case["lines"]
    if file.startswith("utf8_bom"):
        assert not load_tokenizer(out).decode(ids).startswith("\ufeff")


@pytest.mark.parametrize("file", ["truncated.jsonl.zst", "truncated_at_frame_header.jsonl.zst"])
@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_truncated(run: Run, tmp_path: Path, file: str, policy: str) -> None:
    with raises_error("source.truncated", file):
        run(file, on_error=policy)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("file", "line", "bad"),
    [
        ("invalid_utf8.jsonl.zst", 3, 1),
        ("missing_text_key.jsonl.zst", 2, 1),
        ("text_not_a_string.jsonl.zst", 2, 3),
    ],
)
def test_bad_lines(run: Run, expected: dict[str, Any], file: str, line: int, bad: int) -> None:
    with raises_error("record.rejected", f"{file}:{line}"):
        run(file)
    result, _, out = run(file, on_error="quarantine")
    assert result["documents"] == expected[file]["good_documents"]
    assert result["rejected"] == bad
    rejects = [json.loads(reject) for reject in (out / "rejects.jsonl").open()]
    assert rejects[0]["line"] == line


@pytest.mark.parametrize("file", ["empty_frame.jsonl.zst", "zero_bytes.jsonl.zst"])
def test_empty(run: Run, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with raises_error("prep.no_documents"):
        run(file)
    assert not list(tmp_path.rglob("*.json"))
    result, _, _ = run(file, "reference.jsonl.zst")
    assert result["documents"] == 20
    assert f"{file} contains no documents" in capsys.readouterr().err


def test_the_same_shard_twice(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result, _, _ = run("duplicate")
    assert result["documents"] == 40
    assert "contains the same texts as" in capsys.readouterr().err


def test_order_of_bad_lines_does_not_matter(run: Run, broken: Path, tmp_path: Path) -> None:
    lines = (broken / "same20.plain.jsonl").read_bytes().splitlines()
    for name, order in (
        ("first", [b'{"text": null}', *lines]),
        ("last", [*lines, b'{"text": null}']),
    ):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(order))
    streams = [
        run(tmp_path / f"{name}.jsonl", on_error="quarantine")[1] for name in ("first", "last")
    ]
    assert np.array_equal(*streams)


def test_creation_order_does_not_matter(run: Run, broken: Path, tmp_path: Path) -> None:
    fingerprints = set()
    for name, order in (("forwards", SAME_20[:3]), ("backwards", SAME_20[2::-1])):
        (tmp_path / name).mkdir()
        for file in order:
            shutil.copyfile(broken / file, tmp_path / name / file)
        fingerprints.add(run(tmp_path / name)[0]["fingerprint"])
    assert len(fingerprints) == 1


@pytest.mark.parametrize("collection", ["shared"], indirect=True)
def test_golden_ids_of_the_corpus(run: Run, shared: Path) -> None:
    import hashlib

    corpus = shared / "data/corpus"
    golden = json.loads((corpus / "TOKENS.o200k_base.json").read_bytes())["shards"]
    held_out = {"paths": [str(corpus / "val.jsonl.zst")]}
    result, _, out = run(corpus / "train/03.jsonl.zst", validation=held_out, workers=2)
    for split, shard in (("train", "train/03.jsonl.zst"), ("val", "val.jsonl.zst")):
        rows = list(ShardReader(out / split))
        pieces = [rows[0].tokens[:1], *(row.tokens[1 : row.n_valid] for row in rows)]
        ids = np.concatenate(pieces).astype("<u4")
        assert len(ids) == golden[shard]["tokens_with_eot"] == result["splits"][split]["ids"]
        assert hashlib.sha256(ids.tobytes()).hexdigest() == golden[shard]["sha256_u32le"]
    assert DatasetInfo.load(out).subsets == sorted(golden["val.jsonl.zst"]["tokens_by_set"])


# ---------------------------------------------------------------- formats of other programs


@pytest.fixture
def formats(broken: Path) -> Path:
    if not (broken / "formats").is_dir():
        pytest.skip("the shared data has no broken/formats")
    return broken / "formats"


@pytest.mark.parametrize("collection", ["shared"], indirect=True)
def test_formats(run: Run, formats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input that another program wrote, with the outcome that formats/EXPECTED.md names."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    reference = run("formats/reference.parquet")[0]
    assert reference["documents"] == 40
    for name in ("meta_year_10000", "meta_map", "meta_json_string"):
        path = str(formats / f"{name}.parquet")
        result, _, out = run(path)
        assert result["fingerprint"] == reference["fingerprint"], name
        subsets = DatasetInfo.load(out).splits["train"].subsets
        sizes = {subset: size.documents for subset, size in subsets.items()}
        assert sizes == {"Alpha": 20, "Beta": 20}, name
        source = {"paths": [path], "subsets": {"exclude": ["Alpha"]}}
        assert run(source=source)[0]["documents"] == 20, name
    bad = str(formats / "invalid_utf8_text.parquet")
    with raises_error("record.rejected", "invalid_utf8_text.parquet", "10", "0xe9"):
        run(bad)
    result = run(bad, on_error="quarantine", max_reject_fraction=0.1)[0]
    assert (result["documents"], result["rejected"]) == (39, 1)
    hub = {"id": str(formats / "hub_two_splits"), "split": "train+test"}
    assert run(source={"hub": hub})[0]["documents"] == 40
