"""A checkpoint is complete or does not exist, and the latest valid one is found."""

import json
import pickle
import resource
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from errors import raises_error
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from leviathan.checkpoint.dcp import save_shards
from leviathan.checkpoint.describe import checkpoints_table, list_checkpoints
from leviathan.checkpoint.layout import (
    clean_up,
    complete_checkpoints,
    fingerprint,
    prune,
    read_state,
    resolve_checkpoint,
    step_dir,
    step_of,
    verify_manifest,
)
from leviathan.checkpoint.store import (
    SaveFuture,
    latest_valid,
    load_model,
    save_checkpoint,
    try_saving,
    verify_checkpoint,
    weight_shards,
)
from leviathan.config.run import CheckpointConfig, RunConfig
from leviathan.errors import CheckpointError
from leviathan.estimate.params import count_params
from leviathan.model.init import init_weights
from leviathan.model.transformer import CausalLM


@pytest.fixture
def config(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("tokenizer.tiktoken", "tokenizer.meta.json"):
        (data / name).write_text(name)
    model = {"d_model": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 20, "seq_len": 4}
    return RunConfig.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "data": {"path": str(data)},
            "model": {**model, "embedding": {"kind": "tied"}},
            "train": {"steps": 9, "global_batch_size": 2, "micro_batch_size": 1},
            "checkpoint": {"keep_last": 2},
        }
    )


def save(config, mesh, step):
    model = CausalLM(config.model)
    init_weights(model, config.model, seed=step)
    save_checkpoint(config, mesh, {"step": step}, writing(weight_shards(model))).wait()
    return model


def writing(slices):
    return lambda folder: SaveFuture(lambda: save_shards(slices, folder), background=False)


def test_a_saved_model_is_loaded_exactly_under_every_name(config, mesh):
    model = save(config, mesh, 3)
    directory = step_dir(config.run_dir, 3)
    assert verify_manifest(directory) == len(list(directory.iterdir())) - 1
    run = config.run_dir
    for path in (run, run / "latest", run / "checkpoints", run / "checkpoints/latest", directory):
        assert resolve_checkpoint(path) == directory
    loaded, run_config, state = load_model(run)
    assert run_config == config
    assert state["step"] == 3
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_only_the_last_are_kept(config, mesh):
    for step in (1, 2, 3):
        save(config, mesh, step)
    assert [path.name for path in complete_checkpoints(config.run_dir)] == [
        "step-00000002",
        "step-00000003",
    ]
    prune(config.run_dir, CheckpointConfig(keep_last=1), 3)
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_checkpoint_of_a_later_step_does_not_push_out_the_run_s_own(config, mesh):
    for step in (30, 40):
        save(config, mesh, step)
    one = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"keep_last": 1})}
    )
    save(one, mesh, 33)
    assert [path.name for path in complete_checkpoints(config.run_dir)] == [
        "step-00000033",
        "step-00000040",
    ]


def test_a_half_written_checkpoint_does_not_exist_and_is_set_aside(config, mesh, capfd):
    save(config, mesh, 1)
    half = step_dir(config.run_dir, 2)
    shutil.copytree(step_dir(config.run_dir, 1), half)
    (half / "manifest.json").unlink()
    for name in (".saving-step-00000003", ".removing-step-00000000"):
        (config.run_dir / "checkpoints" / name).mkdir()
    assert latest_valid(config.run_dir, mesh) == step_dir(config.run_dir, 1)
    assert resolve_checkpoint(config.run_dir) == step_dir(config.run_dir, 1)
    with raises_error("checkpoint.incomplete", half, "manifest.json", error=CheckpointError):
        resolve_checkpoint(half)
    clean_up(config.run_dir, 1)
    shutil.copytree(step_dir(config.run_dir, 1), half)
    clean_up(config.run_dir, 1)  # complete, but of a later step than the resume point
    assert "renamed to corrupt-step-00000002." in capfd.readouterr().err
    assert sorted(path.name for path in (config.run_dir / "checkpoints").iterdir()) == [
        "corrupt-step-00000002",
        "corrupt-step-00000002-2",
        "step-00000001",
    ]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(config, mesh, damage, capfd):
    save(config, mesh, 1)
    save(config, mesh, 2)
    newest = step_dir(config.run_dir, 2)
    (tensors,) = newest.glob("*.distcp")
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "flip":
        tensors.write_bytes(content)
    elif damage == "truncate":
        tensors.write_bytes(content[:-1])
    elif damage == "remove":
        tensors.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    assert latest_valid(config.run_dir, mesh) == step_dir(config.run_dir, 1)
    assert str(newest) in capfd.readouterr().err
    with raises_error("checkpoint.corrupt", "step-00000002", error=CheckpointError):
        load_model(newest)
    assert load_model(config.run_dir)[2]["step"] == 1
    assert str(newest) in capfd.readouterr().err
    shutil.rmtree(step_dir(config.run_dir, 1))
    with raises_error("checkpoint.all_corrupt", config.run_dir, "all 1 ", error=CheckpointError):
        latest_valid(config.run_dir, mesh)


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        ([], "manifest.json"),
        ({"files": []}, "manifest.json"),
        ({"files": {"state.json": {"sha256": "0"}}}, "bytes"),
        ({"files": {"state.json": 3}}, "manifest.json"),
        ({"files": {}}, "does not list config.yaml, state.json, .metadata, __0_0.distcp"),
    ],
)
def test_a_manifest_of_another_shape_proves_nothing(config, mesh, manifest, named):
    save(config, mesh, 1)
    directory = step_dir(config.run_dir, 1)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with raises_error("checkpoint.corrupt", named, error=CheckpointError):
        verify_manifest(directory)


@pytest.mark.parametrize(
    "step", ['"one"', "null", "true", "-1", "2.0", "1e400", "NaN", "[1]", "[" * 9999]
)
def test_a_step_that_is_not_a_count_is_refused(tmp_path, step):
    path = tmp_path / "state.json"
    path.write_text(f'{{"step": {step}}}')
    with raises_error("checkpoint.corrupt", "state.json", error=CheckpointError):
        read_state(tmp_path)
    path.write_text(f'{{"step": 1, "tokens": {step}}}')
    with raises_error("checkpoint.corrupt", "state.json", error=CheckpointError):
        read_state(tmp_path, tokens=int)
    path.write_text('{"step": 1, "tokens": 0}')
    assert read_state(tmp_path, tokens=int)["tokens"] == 0


@pytest.mark.parametrize("state", ["{}", "[]", "1"])
def test_a_state_without_a_step_is_refused(tmp_path, state):
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    (directory / "state.json").write_text(state)
    with raises_error("checkpoint.corrupt", "state.json", error=CheckpointError):
        read_state(directory)


def resealed(directory, *names):
    """Updates the manifest to the present content of these files, as their writer would."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"] |= fingerprint(directory, names)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def rename_the_directory(directory):
    directory.rename(directory.with_name("step-00000007"))


def change_the_step(directory):
    (directory / "state.json").write_text('{"step": 7}')
    resealed(directory, "state.json")


@pytest.mark.parametrize("change", [rename_the_directory, change_the_step])
def test_the_step_in_state_json_must_be_that_of_the_directory(config, mesh, change):
    save(config, mesh, 1)
    save(config, mesh, 2)
    change(step_dir(config.run_dir, 2))
    newest = complete_checkpoints(config.run_dir)[-1]
    for read in (verify_checkpoint, load_model):
        with raises_error("checkpoint.renamed", "state.json", "step-0000000"):
            read(newest)
    assert latest_valid(config.run_dir, mesh) == step_dir(config.run_dir, 1)


def test_a_checkpoint_with_a_hole_in_a_tensor_is_refused_everywhere(config, mesh, capfd):
    """Its files have the right hashes: whoever wrote it left a chunk out of the metadata."""
    save(config, mesh, 1)
    save(config, mesh, 2)
    newest, name = step_dir(config.run_dir, 2), "model.model.embed_tokens.weight"
    metadata = FileSystemReader(newest).read_metadata()
    (chunk,) = metadata.state_dict_metadata[name].chunks
    metadata.state_dict_metadata[name].chunks = [replace(chunk, sizes=torch.Size((19, 8)))]
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    resealed(newest, ".metadata")
    verify_manifest(newest)
    for read in (verify_checkpoint, load_model):
        with raises_error("checkpoint.corrupt", f"{name} 20×8", "152 of 160"):
            read(newest)
    assert latest_valid(config.run_dir, mesh) == step_dir(config.run_dir, 1)
    assert "152 of 160" in capfd.readouterr().err


def test_moments_of_some_parameters_alone_are_refused(config, mesh):
    save(config, mesh, 1)
    directory = step_dir(config.run_dir, 1)
    metadata = FileSystemReader(directory).read_metadata()
    name = "model.norm.weight"
    for fields in (metadata.state_dict_metadata, metadata.storage_data):
        for key in [k for k in fields if getattr(k, "fqn", k) == f"model.{name}"]:
            moment = f"optim.exp_avg.{name}"
            index = MetadataIndex(moment, key.offset) if fields is metadata.storage_data else moment
            fields[index] = fields[key]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    resealed(directory, ".metadata")
    with raises_error("checkpoint.other_model", "optim.exp_avg", error=CheckpointError):
        verify_checkpoint(directory)


def test_what_the_disk_does_not_take_is_one_message(config, mesh):
    save(config, mesh, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as on a full disk, inside DCP
    try:
        with raises_error("checkpoint.save_failed", "step-00000002", "rank 0"):
            save(config, mesh, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_failed_save_leaves_the_former_checkpoint_and_no_draft(config, mesh):
    save(config, mesh, 1)

    def full_disk(folder):
        (folder / "part").write_text("some")
        raise OSError(28, "No space left on device")

    with raises_error("checkpoint.save_failed", "No space left on device", error=CheckpointError):
        save_checkpoint(config, mesh, {"step": 2}, full_disk).wait()
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == ["step-00000001"]
    verify_manifest(step_dir(config.run_dir, 1))


def test_a_missing_tokenizer_file_is_a_failed_save(config, mesh):
    (config.data.path / "tokenizer.meta.json").unlink()
    with raises_error("checkpoint.save_failed", "tokenizer.meta.json", error=CheckpointError):
        save(config, mesh, 1)
    assert not complete_checkpoints(config.run_dir)


def test_weights_of_another_model_are_refused(config, mesh):
    save(config, mesh, 1)
    directory = step_dir(config.run_dir, 1)
    path = directory / "config.yaml"
    path.write_text(path.read_text().replace("d_model: 8", "d_model: 16"))
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"] |= fingerprint(directory, ["config.yaml"])
    (directory / "manifest.json").write_text(json.dumps(manifest))
    names = ("embed_tokens.weight: expected 20×16", "found 20×8")
    with raises_error("checkpoint.other_model", *names, error=CheckpointError):
        load_model(directory)


def test_nothing_there_is_said_plainly(tmp_path):
    with raises_error("checkpoint.not_found", tmp_path / "nowhere", error=CheckpointError):
        resolve_checkpoint(tmp_path / "nowhere")
    with raises_error("checkpoint.not_found", "no complete checkpoint", error=CheckpointError):
        resolve_checkpoint(tmp_path)
    with raises_error("checkpoint.not_found", "checkpoints/step-00000007", error=CheckpointError):
        resolve_checkpoint(tmp_path / "checkpoints/step-00000007")


def test_those_of_every_so_many_th_step_stay(config, mesh):
    keeps = config.checkpoint.model_copy(update={"keep_last": 1, "keep_every": 4})
    config = config.model_copy(update={"checkpoint": keeps})
    for step in range(1, 8):
        save(config, mesh, step)
    assert [step_of(path) for path in complete_checkpoints(config.run_dir)] == [4, 7]


def test_a_save_in_the_background_ends_when_waited_for(config, mesh):
    written, begun = threading.Event(), threading.Event()

    def slowly():
        begun.set()
        assert written.wait(10)

    handle = SaveFuture(slowly, background=True)
    assert begun.wait(10)
    assert not handle.failed
    written.set()
    handle.wait()


def test_what_fails_in_the_background_is_raised_by_waiting(config, mesh):
    def full_disk(folder):
        return SaveFuture(lambda: (folder / "no" / "such").write_text(""), background=True)

    handle = save_checkpoint(config, mesh, {"step": 2}, full_disk)
    with raises_error("checkpoint.save_failed", "step-00000002", "No such file"):
        handle.wait()
    assert handle.failed
    assert not list((config.run_dir / "checkpoints").iterdir())


def test_a_try_leaves_nothing(config, mesh):
    def write(folder):
        (folder / "part").write_text("some")
        return SaveFuture(lambda: None, background=False)

    try_saving(config.run_dir, mesh, write)
    assert not list(config.run_dir.iterdir())


def test_describing_tells_what_wrote_it_and_names_the_damaged(config, mesh):
    for step in (1, 2):
        save(config, mesh, step)
    for step in (1, 2):
        state = {"step": step, "tokens": 70, "optimizer_steps": step, "world_size": 3}
        (step_dir(config.run_dir, step) / "state.json").write_text(json.dumps(state))
    (step_dir(config.run_dir, 2) / "config.yaml").unlink()
    found = list_checkpoints(config.run_dir)
    assert found["step-00000001"]["parameters"] == count_params(config.model).total
    assert found["step-00000001"]["engine"] == "deepspeed: precision fp32, zero_stage 1"
    assert "config.yaml: missing" in found["step-00000002"]["error"]
    table = checkpoints_table(found)
    assert "step-00000001" in table
    assert "config.yaml: missing" in table
    assert checkpoints_table({}) == "no complete checkpoint"
