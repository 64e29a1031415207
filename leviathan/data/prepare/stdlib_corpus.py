"""Real text on every machine: the standard library of the running Python, as a Pile-format corpus.

Three subsets: module sources, their docstrings, and the pydoc topics. The result depends only on
the Python version. A module is held out completely, its source and docstrings together, so that no
held-out text occurs in training under another name.
"""

import ast
import hashlib
import io
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from typing import Any

from leviathan.console import progress_bar, say
from leviathan.errors import DataError
from leviathan.files import write_atomic

SOURCES, DOCSTRINGS, TOPICS = "Python sources", "Docstrings", "pydoc topics"
HELD_OUT = "heldout.jsonl.zst"
CHOICES = "choices.jsonl"
MANIFEST = "corpus.json"  # written last

# Tests, generated tables, installed packages, and the source of the topics are omitted.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
_LEFT_OUT |= {"__pycache__", "pydoc_data", "config", "ensurepip"}
_HELD_OUT_SHARE = 0.06
_MIN_HELD_OUT_BYTES = 100_000  # characters, enough for the questions
_MIN_CHARACTERS = 200
_QUESTIONS = 100
_CONTEXT_LINES = 6
_PIECES_PER_TEXT = 4


@dataclass(frozen=True)
class _Text:
    text: str
    subset: str


def write_stdlib_corpus(
    out: Path, shards: int = 4, max_bytes: int | None = 10_000_000
) -> dict[str, Any]:
    """Writes `train-00.jsonl.zst` …, `heldout.jsonl.zst` and `choices.jsonl` to `out`.

    `choices.jsonl` is a small multiple-choice task from the held-out sources: `context` (lines
    of code), four `choices` (which line comes next?) and `answer` (its index). An existing corpus
    of the same Python version and arguments is kept.

    Args:
        out: output directory.
        shards: number of training shards.
        max_bytes: maximum UTF-8 bytes of text; None: everything (12 MB in Python 3.11).

    Returns:
        Names, counts and sizes; the content of `corpus.json`.

    Raises:
        DataError: the Python installation has no library sources, or `out` cannot be written.
    """
    settings = {"python": python_version(), "shards": shards, "max_bytes": max_bytes}
    finished = _finished(out, settings)
    if finished is not None:
        say(f"{out}: the corpus is complete")
        return finished
    training, held_out = _collect(max_bytes)
    if len(training) < shards or not held_out:
        raise DataError(
            "corpus.too_few_texts",
            f"only {len(training)} texts found in {_library()} for {shards} shards: this Python "
            "installation has no library sources, or max_bytes is too small",
        )
    texts = training + held_out
    files = {f"train-{shard:02}.jsonl.zst": training[shard::shards] for shard in range(shards)}
    files[HELD_OUT] = held_out
    contents = {name: _pack(lines) for name, lines in files.items()}
    contents[CHOICES] = _jsonl(_questions([t.text for t in held_out if t.subset == SOURCES]))
    manifest = settings | {
        "documents": len(texts),
        "bytes_of_text": sum(len(text.text.encode()) for text in texts),
        "subsets": {
            name: sum(text.subset == name for text in texts)
            for name in (SOURCES, DOCSTRINGS, TOPICS)
        },
        "files": {name: len(content) for name, content in contents.items()},
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomic(out / name, content)
        write_atomic(out / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    except OSError as error:
        raise DataError(
            "output.not_writable", f"cannot write the corpus to {out}: {error.strerror}"
        ) from None
    return manifest


def sample_texts(count: int, max_characters: int = 2_000) -> list[str]:
    """Up to `count` distinct pieces of Python's standard library: sources and pydoc topics.

    The result depends only on the Python version. The pieces come from as many modules as possible,
    at most a few from each. An installation without library sources gives fewer pieces, or none.
    """
    root = _library()
    modules = {path.relative_to(root).as_posix(): path for path in _modules(root)}
    topics = {f"topic {name}": text for name, text in _topics()}
    pieces: dict[str, None] = {}
    for name in sorted([*modules, *topics], key=_chance):
        text = topics[name] if name in topics else _source(modules[name])
        starts = range(0, min(len(text), _PIECES_PER_TEXT * max_characters), max_characters)
        pieces |= dict.fromkeys(text[start : start + max_characters] for start in starts)
        if len(pieces) >= count:
            break
    return list(pieces)[:count]


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        complete = all(
            (out / name).stat().st_size == size for name, size in manifest["files"].items()
        )
        same = all(manifest[key] == value for key, value in settings.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if complete and same else None


# ---------------------------------------------------------------- texts


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _collect(max_bytes: int | None) -> tuple[list[_Text], list[_Text]]:
    """The texts for training and the held-out ones, without exact duplicates.

    Modules and topics are taken in a mixed order that depends only on their names, until both
    splits have their share of the bytes.
    """
    root = _library()
    makers = {path.relative_to(root).as_posix(): path for path in _modules(root)}
    topics = {f"topic {name}": text for name, text in _topics()}
    names = sorted([*makers, *topics], key=_chance)
    limit = max_bytes if max_bytes is not None else sys.maxsize
    for_held_out = max(_MIN_HELD_OUT_BYTES, int(_HELD_OUT_SHARE * limit))
    room = {False: limit - for_held_out, True: for_held_out}
    texts: dict[bool, list[_Text]] = {False: [], True: []}
    seen: set[str] = set()
    with progress_bar("corpus: modules and topics", total=len(names)) as bar:
        for name in names:
            bar.advance()
            is_held_out = _chance(f"held out? {name}") < _HELD_OUT_SHARE
            if room[is_held_out] <= 0:
                continue
            found = _module_texts(makers[name]) if name in makers else [_Text(topics[name], TOPICS)]
            for text in found:
                size = len(text.text.encode())
                if len(text.text) < _MIN_CHARACTERS or text.text in seen:
                    continue
                room[is_held_out] -= size
                if room[is_held_out] < 0:
                    break
                seen.add(text.text)
                texts[is_held_out].append(text)
    return texts[False], texts[True]


def _modules(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        # _sysconfigdata differs between builds of one version.
        if not _LEFT_OUT & {*path.relative_to(root).parts} and "_sysconfigdata" not in path.name:
            yield path


def _source(path: Path) -> str:
    """The text of a module; empty if it cannot be decoded."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, ValueError):
        return ""


def _module_texts(path: Path) -> list[_Text]:
    try:
        with tokenize.open(path) as file:
            source = file.read()
        docstrings = "\n\n\n".join(_docstrings(ast.parse(source)))
    except (OSError, SyntaxError, ValueError):
        return []  # templates, and samples of broken code
    return [_Text(source, SOURCES), _Text(docstrings, DOCSTRINGS)]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yields each docstring under the name of its object, in source order."""
    module = ast.get_docstring(tree)
    if module:
        yield module
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) > 40:
                yield f"{node.name}\n{docstring}"


def _topics() -> list[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions omit it
        return []
    return sorted(topics.items())


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _chance(name: str) -> float:
    """A number in [0, 1) that depends only on `name`."""
    return int.from_bytes(_digest(name), "big") / 2.0**64


# ---------------------------------------------------------------- files


def _pack(texts: Sequence[_Text]) -> bytes:
    import zstandard

    lines = _jsonl({"text": t.text, "meta": {"pile_set_name": t.subset}} for t in texts)
    return zstandard.ZstdCompressor(level=10, write_checksum=True).compress(lines)


def _jsonl(records: Any) -> bytes:
    buffer = io.StringIO()
    for record in records:
        buffer.write(json.dumps(record) + "\n")
    return buffer.getvalue().encode()


def _questions(sources: Sequence[str]) -> list[dict[str, Any]]:
    """Questions on the next of four lines; the wrong ones have equal indentation."""
    places: list[tuple[str, str, str]] = []  # order, context, next line
    for source in sources:
        lines = source.split("\n")
        for number in range(_CONTEXT_LINES, len(lines)):
            context = "\n".join(lines[number - _CONTEXT_LINES : number]) + "\n"
            if _is_telling(lines[number]) and len(context) <= 400:
                places.append((_digest(context + lines[number]).hex(), context, lines[number]))
    places.sort()
    questions: list[dict[str, Any]] = []
    for place, (order, context, line) in enumerate(places):
        wrong: dict[str, None] = {}
        for _, other_context, other in places[place + 1 :] + places[:place]:
            if len(wrong) == 3:
                break
            if _indent(other) == _indent(line) and other != line and other_context != context:
                wrong[other] = None
        if len(wrong) < 3:
            continue
        answer = int(order[-1], 16) % 4
        choices = list(wrong)
        choices.insert(answer, line)
        questions.append({"context": context, "choices": choices, "answer": answer})
        if len(questions) == _QUESTIONS:
            break
    return questions


def _is_telling(line: str) -> bool:
    code = line.strip()
    return 16 <= len(code) <= 72 and not code.startswith(("#", '"', "'")) and "\t" not in line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
