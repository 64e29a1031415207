"""A single-process run for benchmarks: its configuration, process group and batches."""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from batch import text_batch

from leviathan.config.run import RunConfig
from leviathan.data.dataset import TOKENIZER_FILES
from leviathan.data.loader import Batch
from leviathan.parallel.launch_env import keep_freed_memory, read_launch_env
from leviathan.parallel.mesh import Mesh, init_mesh

BODY = {"d_model": 256, "n_layers": 6, "n_heads": 4}  # the 60M-like body


def scratch() -> Path:
    """Creates a directory that is deleted when the program ends."""
    folder = Path(tempfile.mkdtemp(prefix="leviathan-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def world() -> Mesh:
    """Sets up a single-process world as `leviathan train` does."""
    keep_freed_memory()
    return init_mesh(read_launch_env(), tp=1)


def run_config(
    folder: Path,
    engine: dict[str, Any],
    rows: int,
    length: int = 512,
    kind: str = "leviathan",
    **changes: Any,
) -> RunConfig:
    """A 60M-like run with 50,257 ids, `rows` sequences per step in one micro-batch."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (folder / "run").mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        (data / name).touch()
    run = {
        "run_dir": str(folder / "run"),
        "data": {"path": str(data)},
        "model": BODY
        | {"vocab_size": 50_257, "padded_vocab_size": 50_304, "embedding": {"kind": kind}}
        | {"seq_len": length},
        "train": {"steps": 100, "global_batch_size": rows, "micro_batch_size": rows},
        "engine": engine,
    }
    return RunConfig.model_validate(run | changes)


def one_batch(config: RunConfig) -> Batch:
    """A micro-batch of text, its ids taken modulo the vocabulary size."""
    rows, length = config.train.micro_batch_size, config.model.seq_len
    ids = text_batch(rows, length)[0] % config.model.vocab_size
    unique, inverse = torch.unique(ids, return_inverse=True)
    return Batch(ids, ids.roll(-1, 1), unique, inverse, tuple(range(rows)))
