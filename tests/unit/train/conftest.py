"""Whole runs in this process: one rank, a tiny model."""

import json

import pytest
import torch

from leviathan.config.run import RunConfig
from leviathan.parallel.mesh import leave_mesh
from leviathan.train.loop import train


@pytest.fixture
def run_config(tiny_dataset, tmp_path):
    """A function of overriding sections: a run of eight steps that logs every second."""

    def make(name="run", steps=8, **sections):
        settings = {
            "run_dir": str(tmp_path / name),
            "seed": 7,
            "data": {"path": str(tiny_dataset)},
            "model": {
                **{"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "seq_len": 32},
                "vocab_size": 601,
                "embedding": {"kind": "tied"},
            },
            "train": {"steps": 8, "global_batch_size": 4, "micro_batch_size": 2, "log_every": 2},
            "engine": {"kind": "fsdp2"},
        }
        for section, values in sections.items():
            settings[section] = {**settings.get(section, {}), **values}
        settings["train"]["steps"] = steps
        return RunConfig.model_validate(settings)

    return make


@pytest.fixture
def trained():
    """A function: trains a run in this process, on one rank; the lines of its log."""
    threads = torch.get_num_threads()

    def go(config, **options):
        train(config, **options)
        leave_mesh()
        log = config.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()]

    yield go
    leave_mesh()
    torch.set_num_threads(threads)
