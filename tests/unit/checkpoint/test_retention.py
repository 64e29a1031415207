"""How many checkpoints a run keeps and how many bytes they take: one answer, and the right one."""

import shutil

import pytest
import torch

from leviathan.checkpoint.layout import complete_checkpoints, prune, step_dir, step_of
from leviathan.checkpoint.store import SMALL_FILES, checkpoint_bytes, retention, scheduled_saves
from leviathan.config.run import DeepSpeedConfig, Fsdp2Config, RunConfig
from leviathan.parallel.mesh import leave_mesh
from leviathan.preflight.checks import Report, check_checkpoints
from leviathan.train.checkpoint_manager import check_disk_space
from leviathan.train.loop import train

SCHEDULES = [
    # every, keep_last, keep_every, steps
    (0, 2, 0, 10),
    (4, 2, 0, 10),
    (5, 2, 0, 10),
    (2, 1, 4, 10),
    (3, 5, 0, 10),
    (10, 3, 50, 100),
    (10, 2, 20, 205),
    (1, 2, 10, 100),
    (4, 2, 6, 100),  # only every third mark is saved at all
]


@pytest.fixture
def config(tmp_path, tiny_dataset):
    def make(every, keep_last, keep_every, steps):
        return RunConfig.model_validate(
            {
                "run_dir": str(tmp_path / "run"),
                "data": {"path": str(tiny_dataset)},
                "model": {
                    **{"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 601},
                    **{"seq_len": 32, "embedding": {"kind": "tied"}},
                },
                "train": {"steps": steps, "global_batch_size": 2, "micro_batch_size": 1},
                "checkpoint": {"every": every, "keep_last": keep_last, "keep_every": keep_every},
            }
        )

    return make


def saved(config, step):
    folder = step_dir(config.run_dir, step)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_counts_are_those_that_saving_and_pruning_leave(config, schedule):
    run = config(*schedule)
    plan, most = retention(run), 0
    for step in scheduled_saves(run):
        saved(run, step)
        most = max(most, len(complete_checkpoints(run.run_dir)))
        prune(run.run_dir, run.checkpoint, step)
    left = [step_of(path) for path in complete_checkpoints(run.run_dir)]
    assert list(plan.kept) == left
    assert plan.at_once == plan.more == most
    assert retention(run).more == 0  # it is complete


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_needs_what_is_still_to_come(config, schedule):
    run = config(*schedule)
    saves = scheduled_saves(run)
    for step in saves[: len(saves) // 2]:
        saved(run, step)
        prune(run.run_dir, run.checkpoint, step)
    plan, there = retention(run), len(complete_checkpoints(run.run_dir))
    most = there
    for step in saves[len(saves) // 2 :]:
        saved(run, step)
        most = max(most, len(complete_checkpoints(run.run_dir)))
        prune(run.run_dir, run.checkpoint, step)
    assert plan.more == most - there


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_check_and_trainer_say_the_same(config, schedule, monkeypatch, capfd):
    run, report = config(*schedule), Report()
    run.run_dir.mkdir()
    check_checkpoints(report, run)
    figures = report.figures["checkpoints"]
    real = shutil.disk_usage(run.run_dir)
    free = figures["at_once"] * figures["bytes"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=free))
    check_disk_space(run)
    assert not capfd.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=free - 1))
    if figures["at_once"] > 1:
        check_disk_space(run)
        assert f"up to {figures['at_once']} of" in " ".join(capfd.readouterr().err.split())
    report = Report()
    check_checkpoints(report, run)
    assert report.findings[0].level == "error"


@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed"])
def test_more_ranks_store_more_pieces(config, kind):
    run = config(0, 2, 0, 10)
    engine = {"fsdp2": Fsdp2Config, "deepspeed": DeepSpeedConfig}[kind]()
    run = run.model_copy(update={"engine": engine})
    assert checkpoint_bytes(run, 4) > checkpoint_bytes(run)


def test_a_long_run_with_many_marks(config):
    plan = retention(config(1, 3, 1, 50_000))
    assert (plan.saves, len(plan.kept), plan.at_once) == (50_000,) * 3


def test_a_real_run_keeps_what_was_counted(config):
    """Number of checkpoints exactly; bytes up to the length of numbers and paths in small files."""
    sections = config(2, 1, 4, 10).model_dump(mode="json")
    run = RunConfig.model_validate({**sections, "engine": {"kind": "fsdp2"}})
    threads = torch.get_num_threads()
    plan = retention(run)
    train(run)
    leave_mesh()
    torch.set_num_threads(threads)
    there = complete_checkpoints(run.run_dir)
    assert [step_of(path) for path in there] == list(plan.kept) == [4, 8, 10]
    for path in there:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert plan.bytes_each == pytest.approx(size, abs=SMALL_FILES)
