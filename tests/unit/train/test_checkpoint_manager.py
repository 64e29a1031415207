"""Room for checkpoints, before the first step."""

import shutil
from types import SimpleNamespace

import pytest
from errors import raises_error

from leviathan.config.run import RunConfig
from leviathan.estimate.params import count_params
from leviathan.train.checkpoint_manager import check_disk_space


@pytest.fixture
def config(tmp_path, tiny_dataset):
    model = {"d_model": 64, "n_layers": 1, "n_heads": 2, "vocab_size": 601, "seq_len": 32}
    (tmp_path / "run").mkdir()
    return RunConfig.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "data": {"path": str(tiny_dataset)},
            "model": {**model, "embedding": {"kind": "tied"}},
            "train": {"steps": 100, "global_batch_size": 2, "micro_batch_size": 1},
            "checkpoint": {"every": 10, "keep_last": 3, "keep_every": 50},
        }
    )


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes of every disk: nothing else can be had without filling one."""

    def set_free(count):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=count))

    return set_free


def test_room_for_all_is_silent(config, free, capfd):
    size = 12 * count_params(config.model).total
    free(7 * size)  # three, the new one, and one for good that is none of these
    check_disk_space(config)
    assert not capfd.readouterr().err


def test_room_for_some_is_a_warning_with_figures(config, free, capfd):
    size = 12 * count_params(config.model).total
    free(2 * size)
    check_disk_space(config)
    warning = " ".join(capfd.readouterr().err.split())
    assert "the checkpoints to be kept at once will take" in warning
    assert "(up to 5 of 1." in warning


def test_no_room_for_one_is_an_error(config, free):
    free(12 * count_params(config.model).total)  # but not for the small files
    with raises_error("checkpoint.no_space"):
        check_disk_space(config)
