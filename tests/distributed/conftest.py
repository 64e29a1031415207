"""A small run on the tiny dataset, for the tests that launch one."""

import pytest
import yaml
from runs import STEPS


@pytest.fixture(scope="module")
def run_file(tiny_dataset, tmp_path_factory):
    """A run of two ranks on the tiny dataset; `run_dir` is set on the command line."""
    folder = tmp_path_factory.mktemp("runs")
    run = {
        "run_dir": str(folder / "run"),
        "data": {"path": str(tiny_dataset), "shuffle_window": 100},
        "model": {
            "d_model": 16,
            "n_layers": 2,
            "n_heads": 2,
            "seq_len": 32,
            "vocab_size": 601,
            "padded_vocab_size": 608,
            "embedding": {"kind": "leviathan", "d_seed": 8, "heads": 2, "knots": 4, "rank": 4},
        },
        "train": {
            "steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "log_every": 1,
            "eval_every": 15,
        },
        "optim": {"lr": 0.01, "warmup_steps": 3},
        "checkpoint": {"every": 10, "keep_last": 3},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path
