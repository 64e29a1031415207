"""Compares data preparation with tiktoken's `encode_ordinary_batch` on the same text in memory.

    python benchmarks/prep.py [--json] [--text FOLDER_OR_FILE …]

Ours converts compressed shards to the finished dataset in a process without heavy imports, measured
from the call of `prepare()` to its return, including the start of the workers. The other side has
decoded text and a loaded vocabulary, and discards its ids.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tiktoken
import zstandard
from harness import Report, arguments, shared_data

from leviathan.data.prepare.readers import read
from leviathan.data.prepare.records import Document
from leviathan.data.prepare.sources import find_inputs

GOAL = 2.5
SHARDS = 8
LEAST_DOCUMENT, MOST_DOCUMENT = 100, 1_000_000  # bytes; excludes data files with the suffix .py
PILE_BYTES = 825 * 2**30

# Times only the call; with "shares", also its stages on one core.
CHILD = """
import json, sys, time
from leviathan.config.data import PrepConfig
from leviathan.data.prepare import pipeline
from leviathan.data.prepare.readers import read
from leviathan.data.prepare.sources import find_inputs

def timed(name, work):
    def run(*args, **kwargs):
        start = time.perf_counter()
        result = work(*args, **kwargs)
        spent[name] = time.perf_counter() - start
        return result
    return run

if __name__ == "__main__":
    config, spent = PrepConfig.model_validate_json(sys.argv[1], strict=False), {}
    if sys.argv[2] == "shares":
        for name in ("_tokenize_all", "pack_parts"):
            setattr(pipeline, name, timed(name, getattr(pipeline, name)))
        start = time.perf_counter()
        for source in find_inputs(config.source.paths):
            for item in read(source):
                pass
        spent["read"] = time.perf_counter() - start
    start = time.perf_counter()
    result = pipeline.prepare(config)
    print(json.dumps({"seconds": time.perf_counter() - start, "tokens": result["tokens"]} | spent))
"""


@dataclass(frozen=True)
class Run:
    """One preparation: seconds of the call and of the process, and peak memory."""

    tokens: int
    seconds: float
    wall: float
    peak_mb: float
    stages: dict[str, float]


def main() -> None:
    """Measures and prints."""
    parser = arguments((__doc__ or "").splitlines()[0], rounds=3)
    parser.add_argument(
        "--text", nargs="*", help="corpus files or directories (default: the available corpus)"
    )
    parser.add_argument(
        "--megabytes", type=int, default=150, help="of text, if it is generated (default: 150)"
    )
    parser.add_argument("--tokenizer", default="o200k_base")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    shared = shared_data()
    if shared is not None:
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(shared / "tiktoken_cache"))
    with tempfile.TemporaryDirectory(prefix="prep-benchmark-") as scratch:
        folder = Path(scratch)
        paths = options.text or make_corpus(folder / "corpus", shared, options.megabytes * 10**6)
        measure(Report("prep", options.json), options, paths, folder)


def measure(report: Report, options: Any, paths: list[str], scratch: Path) -> None:
    """Measures all values in sequence."""
    texts = [
        item.text
        for source in find_inputs(paths)
        for item in read(source)
        if isinstance(item, Document) and item.text
    ]
    size = sum(len(text.encode()) for text in texts)
    encoding = tiktoken.get_encoding(options.tokenizer)
    config = {
        "source": {"paths": paths},
        "tokenizer": options.tokenizer,
        "workers": options.workers,
        "seq_len": 512,
    }
    runs, pairs = [], []
    for number in range(options.rounds):
        theirs = None if number % 2 else batch_seconds(encoding, texts, options.workers)
        runs.append(prepare(config | {"out": str(scratch / f"out{number}")}))
        if theirs is None:
            theirs = batch_seconds(encoding, texts, options.workers)
        pairs.append((runs[-1].seconds, theirs))
    cores = f"{options.workers} cores, {size / 1e6:.0f} MB of text"
    report.compare(
        f"compressed shards to dataset, {cores}",
        pairs,
        "tiktoken encode_ordinary_batch, text in memory",
        "s",
        f"≥ {GOAL}",
    )
    run = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    report.figure("the same, in tokens", run.tokens / run.seconds, "tokens/s")
    report.figure("the same, the whole process", run.wall, "s")
    report.figure("peak memory, sum over processes", max(run.peak_mb for run in runs), "MB")
    command = [sys.executable, "-m", "leviathan", "prep", str(scratch / "again.yaml")]
    (scratch / "again.yaml").write_text(json.dumps(config | {"out": str(scratch / "out0")}))
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    report.figure("leviathan prep, again: it is complete", time.perf_counter() - start, "s")
    shares(report, config | {"workers": 1, "out": str(scratch / "shares")})
    stored = sum(source.size() or 0 for source in find_inputs(paths))
    project(report, run, options.workers, size, stored)


def shares(report: Report, config: dict[str, Any]) -> None:
    """Measures the time of each stage on one core."""
    stages = prepare(config, "shares").stages
    total = stages["_tokenize_all"] + stages["pack_parts"]
    for name, seconds in (
        ("reading", stages["read"]),
        ("tokenizing", stages["_tokenize_all"] - stages["read"]),
        ("packing and writing", stages["pack_parts"]),
    ):
        report.figure(f"share of {name}, one core", 100 * seconds / total, "%")


def project(report: Report, run: Run, workers: int, size: int, stored: int) -> None:
    """Projects the time for The Pile on more cores, assuming linear scaling.

    Assumes similar text (tokens per byte, packing), at least as many input shards as cores or
    several threads per shard, and a sufficiently fast disk: one pass reads the compressed text and
    the parts and writes the parts and the dataset, with four bytes per token each.
    """
    tokens = PILE_BYTES * run.tokens / size
    a_core = run.tokens / run.seconds / workers
    per_token = 3 * 4 + stored / run.tokens
    for cores in (16, 64):
        rate = cores * a_core
        name = f"The Pile, {tokens / 1e9:.0f} G tokens, {cores} cores"
        report.figure(f"{name} (projected)", tokens / rate / 3600, "h")
        report.figure(f"{name}: disk needed", rate * per_token / 1e6, "MB/s")


def prepare(config: dict[str, Any], mode: str = "") -> Run:
    """Runs a preparation in a separate process and monitors its memory."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(config), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    peak = [0.0]
    watcher = threading.Thread(target=watch, args=(process.pid, peak), daemon=True)
    watcher.start()
    out, _ = process.communicate()
    wall = time.perf_counter() - start
    watcher.join()
    if process.returncode:
        raise SystemExit(f"error: the preparation failed; run leviathan prep with {config}")
    result = json.loads(out.splitlines()[-1])
    tokens, seconds = result.pop("tokens"), result.pop("seconds")
    return Run(tokens, seconds, wall, peak[0], result)


def watch(pid: int, peak: list[float]) -> None:
    """Records the peak sum of resident memory of a process and its children, in MB."""
    try:
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for each in (process, *process.children(recursive=True)):
                try:
                    total += each.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            peak[0] = max(peak[0], total / 1e6)
            time.sleep(0.05)
    except psutil.NoSuchProcess:
        pass


def batch_seconds(encoding: tiktoken.Encoding, texts: list[str], threads: int) -> float:
    """Runs tiktoken's batch call."""
    start = time.perf_counter()
    encoding.encode_ordinary_batch(texts, num_threads=threads)
    return time.perf_counter() - start


# ---------------------------------------------------------------- text


def make_corpus(folder: Path, shared: Path | None, size: int) -> list[str]:
    """The shared corpus, if it exists, and the sources of the installed packages up to `size`."""
    folder.mkdir()
    paths: list[str] = []
    if shared is not None:
        paths.append(str(shared / "corpus/train"))
        size -= sum(
            len(item.text)
            for source in find_inputs(paths)
            for item in read(source)
            if isinstance(item, Document)
        )
    shards: list[list[str]] = [[] for _ in range(SHARDS)]
    for number, text in enumerate(sources(size)):
        meta = {"pile_set_name": "Python"}
        shards[number % SHARDS].append(json.dumps({"text": text, "meta": meta}))
    for number, lines in enumerate(shards):
        packed = zstandard.ZstdCompressor(3).compress("\n".join(lines).encode())
        (folder / f"{number:02}.jsonl.zst").write_bytes(packed)
    return [*paths, str(folder)]


def sources(size: int) -> Iterator[str]:
    """Python files of the running environment, `size` bytes in total, sorted by name."""
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        if size <= 0:
            return
        if LEAST_DOCUMENT <= path.stat().st_size <= MOST_DOCUMENT:
            try:
                text = path.read_text()
            except UnicodeDecodeError:
                continue
            size -= len(text)
            yield text


if __name__ == "__main__":
    main()
