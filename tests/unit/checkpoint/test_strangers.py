"""Untrusted files are read as data: none of them can run code, whatever its metadata."""

import io
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from errors import raises_error
from torch.distributed.checkpoint.filesystem import FileSystemReader

from leviathan.checkpoint.dcp import FlatShard, load_shards, save_shards, stored_shapes
from leviathan.checkpoint.store import load_model
from leviathan.config.load import load_config
from leviathan.config.run import ModelConfig, RunConfig
from leviathan.errors import CheckpointError
from leviathan.evaluate.frequency import read_counts
from leviathan.hf.llama import read_llama_model

LLAMA = ModelConfig(d_model=8, n_layers=1, n_heads=2, vocab_size=16, embedding={"kind": "tied"})


class Harmful:
    """Creates a file as soon as it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return open, (str(self.proof), "w")


@pytest.fixture
def proof(tmp_path):
    path = tmp_path / "harm-was-done"
    pickle.loads(pickle.dumps(Harmful(path))).close()
    assert path.exists()  # a careless reader would do it
    path.unlink()
    yield path
    assert not path.exists()


def test_metadata(tmp_path, proof):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful(proof)))
    with raises_error("checkpoint.corrupt", "io.open"):
        stored_shapes(tmp_path)


def test_harm_inside_true_metadata(tmp_path, proof):
    """Everything else about it is right: it is DCP's own object, with one more thing in it."""
    save_shards([FlatShard("a", (4,), 0, torch.ones(4))], tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    metadata.planner_data = Harmful(proof)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with raises_error("checkpoint.save_failed"):
        load_shards([FlatShard("a", (4,), 0, torch.zeros(4))], tmp_path)


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "os.system", "torch.hub.load"])
def test_no_function_is_admitted(tmp_path, name):
    module, _, function = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{function}\n.".encode())
    with raises_error("checkpoint.corrupt"):
        stored_shapes(tmp_path)


def test_tensors(tmp_path, proof):
    save_shards([FlatShard("a", (4,), 0, torch.ones(4))], tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    harm = io.BytesIO()
    torch.save(Harmful(proof), harm)
    size = file.stat().st_size
    file.write_bytes(harm.getvalue()[:size].ljust(size, b"\0"))
    with pytest.raises(CheckpointError):
        load_shards([FlatShard("a", (4,), 0, torch.zeros(4))], tmp_path)
    # As long as the harm needs, with metadata that say so.
    metadata = FileSystemReader(tmp_path).read_metadata()
    file.write_bytes(harm.getvalue())
    for info in metadata.storage_data.values():
        info.length = len(harm.getvalue())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        load_shards([FlatShard("a", (4,), 0, torch.zeros(4))], tmp_path)


def test_configuration(tmp_path, proof):
    path = tmp_path / "run.yaml"
    path.write_text(f"run_dir: !!python/object/apply:builtins.open ['{proof}', 'w']\n")
    with raises_error("config.invalid_yaml", "YAML"):
        load_config(path, [], RunConfig)


def test_llama_folder(tmp_path, proof):
    torch.save({"a": Harmful(proof)}, tmp_path / "pytorch_model.bin")
    shutil.copyfile(tmp_path / "pytorch_model.bin", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with raises_error("import.unreadable"):
        read_llama_model(tmp_path, LLAMA)
    with pytest.raises(CheckpointError):
        load_model(tmp_path)


def test_token_counts(tmp_path, proof):
    counts = np.array([Harmful(proof)], dtype=object)
    np.save(tmp_path / "token_counts.npy", counts, allow_pickle=True)
    with raises_error("token_counts.unreadable"):
        read_counts(tmp_path / "token_counts.npy", 1)
