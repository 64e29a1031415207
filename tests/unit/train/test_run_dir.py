"""A run folder belongs to one run, and to one process group at a time."""

import json
import shutil

import pytest
from errors import raises_error

from leviathan.checkpoint.dcp import save_shards
from leviathan.checkpoint.store import SaveFuture, save_checkpoint, weight_shards
from leviathan.config.run import RunConfig
from leviathan.data.format import DatasetInfo
from leviathan.errors import ConfigError
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM
from leviathan.train.run_dir import ResumePoint, describe_run, find_resume_point, lock_run_dir


@pytest.fixture
def make(tmp_path, tiny_dataset):
    """A run's configuration, with any part of it changed."""

    def config(**changes):
        model = {"d_model": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 601, "seq_len": 32}
        run = {
            "run_dir": str(tmp_path / "run"),
            "data": {"path": str(tiny_dataset)},
            "model": {**model, "embedding": {"kind": "tied"}},
            "train": {"steps": 9, "global_batch_size": 4, "micro_batch_size": 2},
        }
        for name, values in changes.items():
            run[name] = {**run.get(name, {}), **values} if isinstance(values, dict) else values
        return RunConfig.model_validate(run)

    return config


@pytest.fixture
def begun(make, mesh, tiny_dataset):
    """A run with one checkpoint, after step 3; gives its dataset's description."""
    info = DatasetInfo.load(tiny_dataset)

    def begin(config):
        state = {"step": 3, "tokens": 300, "skipped": 1, "data_fingerprint": info.fingerprint}
        model = CausalLM(config.model)
        init_weights(model, config.model, config.seed)

        def tensors(folder):
            return SaveFuture(lambda: save_shards(weight_shards(model), folder), False)

        save_checkpoint(config, mesh, state, tensors).wait()
        return info

    return begin


def test_a_new_folder_starts_at_step_zero(make, mesh, tiny_dataset):
    assert find_resume_point(make(), DatasetInfo.load(tiny_dataset), mesh) == ResumePoint()


def test_going_on_with_other_batches_in_memory_and_other_intervals(make, mesh, begun):
    info = begun(make())
    changed = make(
        train={"micro_batch_size": 1, "log_every": 1, "eval_every": 5},
        engine={"kind": "deepspeed", "zero_stage": 2},
        checkpoint={"every": 2, "keep_last": 9},
    )
    start = find_resume_point(changed, info, mesh)
    assert (start.step, start.tokens, start.skipped) == (3, 300, 1)
    assert start.checkpoint is not None
    assert start.checkpoint.name == "step-00000003"


def test_going_on_with_another_way_of_tensor_parallelism(make, mesh, begun):
    def lev(tp, mode):
        model = {"padded_vocab_size": 608, "embedding": {"kind": "leviathan", "tp_mode": mode}}
        return make(model=model, parallel={"tp": tp})

    info = begun(lev(2, "heads"))
    assert find_resume_point(lev(1, "ids"), info, mesh).step == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed: 1234 in the existing run, 2 now"),
        ({"optim": {"lr": 0.5}}, "optim.lr: 0.001 in the existing run, 0.5 now"),
        ({"train": {"steps": 12}}, "train.steps: 9 in the existing run, 12 now"),
        ({"train": {"global_batch_size": 8}}, "train.global_batch_size: 4"),
        ({"data": {"shuffle_window": 5}}, "data.shuffle_window: 10000"),
        ({"model": {"embedding": {"kind": "leviathan"}}}, "model.embedding.kind: tied"),
    ],
)
def test_another_run_is_refused_and_every_difference_named(make, mesh, begun, change, named):
    info = begun(make())
    with pytest.raises(ConfigError) as error:
        find_resume_point(make(**change), info, mesh)
    assert named in str(error.value)


def test_a_constant_schedule_may_go_on_for_longer(make, mesh, begun):
    info = begun(make(optim={"schedule": "constant"}))
    longer = make(optim={"schedule": "constant"}, train={"steps": 20})
    assert find_resume_point(longer, info, mesh).step == 3


def test_another_data_set_is_refused(make, mesh, begun):
    info = begun(make())
    other = info.model_copy(update={"fingerprint": "0" * 64})
    with raises_error("run_dir.other_dataset", "run_dir"):
        find_resume_point(make(), other, mesh)


def test_only_one_process_group_works_in_a_folder(make, mesh, tiny_dataset):
    run_dir, info = make().run_dir, DatasetInfo.load(tiny_dataset)
    with (
        lock_run_dir(run_dir, mesh),
        raises_error("run_dir.locked"),
        lock_run_dir(run_dir, mesh),
    ):
        pass
    with lock_run_dir(run_dir, mesh):
        describe_run(make(), info, mesh, ResumePoint())
    assert json.loads((run_dir / "run.json").read_text())["world_size"] == 1


def test_the_lock_goes_with_its_owner(make, mesh):
    run_dir = make().run_dir
    with pytest.raises(ValueError, match="refused"), lock_run_dir(run_dir, mesh):
        raise ValueError("refused")
    assert not run_dir.exists()
    run_dir.mkdir()
    with lock_run_dir(run_dir, mesh):
        assert [path.name for path in run_dir.iterdir()] == [".lock"]
    assert list(run_dir.iterdir()) == []


def test_what_another_run_logged_is_not_overwritten(make, mesh, tiny_dataset, capfd):
    """Its only checkpoint has lost its manifest."""
    config, info = make(), DatasetInfo.load(tiny_dataset)
    half = config.run_dir / "checkpoints/step-00000003"
    half.mkdir(parents=True)
    describe_run(config, info, mesh, ResumePoint())
    assert find_resume_point(make(seed=2, run_dir=str(config.run_dir)), info, mesh) == ResumePoint()
    (config.run_dir / "checkpoints/corrupt-step-00000003").rename(half)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    with raises_error("run_dir.other_config", "config.yaml", "1234"):
        find_resume_point(make(seed=2), info, mesh)
    assert half.exists()
    assert find_resume_point(config, info, mesh) == ResumePoint()
    assert not half.exists()
    assert "renamed to corrupt-step-00000003" in capfd.readouterr().err


def test_a_damaged_newest_checkpoint_is_set_aside(make, mesh, begun):
    config = make()
    info = begun(config)
    later = config.run_dir / "checkpoints/step-00000004"
    shutil.copytree(config.run_dir / "checkpoints/step-00000003", later)
    (later / "state.json").write_text("{}")
    assert find_resume_point(config, info, mesh).step == 3
    names = sorted(path.name for path in later.parent.iterdir())
    assert names == ["corrupt-step-00000004", "step-00000003"]


def test_a_run_folder_that_takes_no_files_is_one_message(make, mesh, tiny_dataset):
    config, info = make(), DatasetInfo.load(tiny_dataset)
    (config.run_dir / "config.yaml").mkdir(parents=True)
    with raises_error("metrics.not_writable"):
        describe_run(config, info, mesh, ResumePoint())
