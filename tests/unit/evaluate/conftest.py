"""Real checkpoints of small random models in separate run directories, on the tiny dataset."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from leviathan.checkpoint.dcp import FlatShard, save_shards
from leviathan.checkpoint.layout import (
    file_names,
    fingerprint,
    step_dir,
    write_json,
    write_manifest,
)
from leviathan.config.load import dump_config
from leviathan.config.run import RunConfig
from leviathan.data.format import DatasetInfo
from leviathan.data.tokenizer import load_tokenizer
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM

STEP = 20


def write_run(
    run_dir: Path, data: Path, kind: str, spread: float = 0.1, seq_len: int | None = None
) -> Path:
    """A run directory with one checkpoint, whose predictions are far from uniform."""
    info = DatasetInfo.load(data)
    model_config = {
        "d_model": 16,
        "n_layers": 2,
        "n_heads": 2,
        "seq_len": seq_len or info.seq_len,
        "vocab_size": info.vocab_size,
        "padded_vocab_size": info.vocab_size + 7,
        "init_std": spread,
        "embedding": {"kind": kind}
        | ({"d_seed": 4, "heads": 2, "knots": 4, "rank": 3} if kind == "leviathan" else {}),
    }
    config = RunConfig.model_validate(
        {
            "run_dir": run_dir,
            "data": {"path": data},
            "model": model_config,
            "train": {"steps": STEP, "global_batch_size": 4, "micro_batch_size": 2},
        }
    )
    model = CausalLM(config.model)
    init_weights(model, config.model, seed=7)
    with torch.no_grad():
        model.model.norm.weight.mul_(3)
    folder = step_dir(run_dir, STEP)
    folder.mkdir(parents=True)
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    save_shards(
        [FlatShard(k, tuple(t.shape), 0, t.reshape(-1)) for k, t in tensors.items()], folder
    )
    (folder / "config.yaml").write_text(dump_config(config))
    (run_dir / "config.yaml").write_text(dump_config(config))
    write_json(folder / "state.json", {"step": STEP, "data_fingerprint": info.fingerprint})
    load_tokenizer(data).save(folder)
    write_manifest(folder, fingerprint(folder, file_names(folder)))
    return run_dir


@pytest.fixture(scope="session")
def runs(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One run directory per kind of input embedding; tests may add evaluations to them."""
    root = tmp_path_factory.mktemp("runs")
    return {kind: write_run(root / kind, tiny_dataset, kind) for kind in ("tied", "leviathan")}


@pytest.fixture(scope="session")
def wide_run(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose context is wide enough for the tasks of lm-eval."""
    return write_run(tmp_path_factory.mktemp("wide") / "run", tiny_dataset, "leviathan", seq_len=96)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches for the network fails."""

    def refuse(*args: Any) -> None:
        raise AssertionError(f"reached for the network: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory that a test may modify."""

    def make(data: Path, kind: str = "tied", name: str = "run") -> Path:
        return write_run(tmp_path / name, data, kind)

    return make
