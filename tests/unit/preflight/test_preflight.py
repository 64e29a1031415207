"""Rows of a check one by one, on real files, sockets and processes."""

import mmap
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import streaming
from errors import raises_error

from leviathan.checkpoint.store import retention
from leviathan.config.load import load_config
from leviathan.config.plan import RunPlan
from leviathan.config.run import RunConfig
from leviathan.errors import DataError
from leviathan.estimate.cost_model import Hardware
from leviathan.launch.commands import Request
from leviathan.launch.hosts import Host
from leviathan.parallel.launch_env import free_port
from leviathan.preflight import checks as node_checks
from leviathan.preflight.check import CheckOptions, find_target
from leviathan.preflight.checks import (
    Report,
    Target,
    check_checkpoints,
    check_cost,
    check_data,
    check_memory,
    check_ranks,
    check_run_dir,
    table,
)
from leviathan.train.run_dir import lock_run_dir

CONFIGS = Path(__file__).parents[3] / "configs"


def run(*changes, name="pile_400m"):
    return load_config(CONFIGS / f"run/{name}.yaml", changes, RunConfig)


def only(report):
    (finding,) = report.findings
    return finding.level, finding.message


def test_the_highest_level_counts_and_an_exception_is_an_error():
    report = Report()
    assert report.level == "ok"
    report.add("one", "warning", "look [here]")
    assert report.level == "warning"
    with report.catching("two"):
        raise DataError("data.broken", "fix it")
    report.add("three", "ok", "well")
    assert report.level == "error"
    shown = table(report.as_dict())
    assert "look [here]" in shown  # not read as markup
    assert "fix it" in shown
    assert shown.endswith("Failed with 1 error and 1 warning.")


@pytest.mark.parametrize(
    ("every", "keep_last", "keep_every", "steps", "saves", "stay"),
    [
        (0, 2, 0, 10, 1, [10]),
        (4, 2, 0, 10, 3, [8, 10]),
        (5, 2, 0, 10, 2, [5, 10]),
        (2, 1, 4, 10, 5, [4, 8, 10]),
        (3, 5, 0, 10, 4, [3, 6, 9, 10]),
    ],
)
def test_which_checkpoints_stay(
    tiny_dataset, tmp_path, every, keep_last, keep_every, steps, saves, stay
):
    changes = {"every": every, "keep_last": keep_last, "keep_every": keep_every}
    options = [f"checkpoint.{key}={value}" for key, value in changes.items()]
    options += [f"data.path={tiny_dataset}", f"run_dir={tmp_path / 'run'}"]
    config = run(f"train.steps={steps}", "optim.warmup_steps=1", *options)
    plan = retention(config)
    assert (plan.saves, list(plan.kept)) == (saves, stay)


def test_uneven_ranks_are_a_warning_and_impossible_ones_an_error():
    report = Report()
    check_ranks(report, run(), 8)
    assert only(report)[0] == "ok"
    report = Report()
    check_ranks(report, run("train.global_batch_size=9", "train.micro_batch_size=2"), 8)
    level, message = only(report)
    assert level == "warning"
    assert "44% of the computed samples are padding" in message  # 16 rows are computed for 9
    with raises_error("parallel.indivisible"):
        check_ranks(Report(), run("parallel.tp=2", "model.embedding.tp_mode=ids"), 7)


def test_time_is_flops_over_the_stated_share_of_the_peak():
    plan, report = RunPlan(run(), 8), Report()
    hardware = Hardware(flops=1e15, mfu=0.5)
    check_cost(report, plan, Target("made up", "cuda", hardware, assumed=False))
    assert only(report)[0] == "ok"
    tokens = 32_000 * 512 * 512
    assert report.figures["tokens"] == tokens
    flops = tokens * 2_533_668_864
    assert report.figures["seconds"] == pytest.approx(flops / (8 * 0.5e15), rel=0.01)
    hours = report.figures["seconds"] * 8 / 3600
    assert report.figures["device_hours"] == pytest.approx(hours)


@pytest.mark.parametrize(("room", "verdict"), [(20e9, "ok"), (12e9, "warning"), (9e9, "error")])
def test_memory_is_held_against_the_device(room, verdict):
    report = Report()
    target = Target("made up", "cuda", Hardware(memory_bytes=room), assumed=False)
    check_memory(report, RunPlan(run(), 8), target)
    assert only(report)[0] == verdict
    held = report.figures["memory"]
    parts = {k: v for k, v in held.items() if k not in ("total", "moment", "device_bytes")}
    assert sum(parts.values()) == held["total"]
    assert ("engine.activation_checkpointing=true" in only(report)[1]) == (verdict == "error")


def test_checkpoints_are_held_against_the_disk(tiny_dataset, tmp_path):
    options = [f"data.path={tiny_dataset}", f"run_dir={tmp_path / 'a' / 'b'}"]
    report, config = Report(), run(*options)
    check_checkpoints(report, config)
    each = report.figures["checkpoints"]["bytes"]
    assert each == pytest.approx(12 * 408_266_880, rel=0.01)
    free = shutil.disk_usage(tmp_path).free
    many = [f"checkpoint.keep_last={free // each + 2}", "checkpoint.every=1"]
    report = Report()
    check_checkpoints(report, run(*options, *many))
    assert only(report)[0] == "error"
    assert str(tmp_path) in only(report)[1]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_where_a_run_is_at_work_is_refused(tmp_path):
    config = run(f"run_dir={tmp_path / 'run'}")
    report = Report()
    check_run_dir(report, config, None)
    assert only(report)[0] == "ok"
    with (
        lock_run_dir(config.run_dir, Alone()),
        raises_error("run_dir.locked"),
    ):
        check_run_dir(Report(), config, None)


class Alone:
    """As much of a mesh as a run of one rank needs to take its folder."""

    rank = 0
    sync_errors = staticmethod(nullcontext)


def test_devices_by_name_and_by_figures():
    request = Request(("run.yaml",), "deepspeed", ranks=2)
    assert find_target(CheckOptions(request, 2, "h200")).hardware.memory_bytes == 141e9
    own = find_target(CheckOptions(request, 2, "a100", memory_gb=40, peak_tflops=100)).hardware
    assert (own.memory_bytes, own.flops) == (40e9, 100e12)
    with raises_error("cli.invalid_option", "--device", "h100"):
        find_target(CheckOptions(request, 2, "h1"))


def test_a_port_that_is_taken_names_its_holder():
    report, port = Report(), free_port()
    node_checks.check_port(report, port, ())
    assert only(report) == ("ok", f"{port} is free")
    with socket.create_server(("", port)):
        report = Report()
        node_checks.check_port(report, port, ())
    level, message = only(report)
    assert level == "error"
    assert "choose another --port" in message


def test_shared_memory_that_nobody_uses_is_stale(tmp_path):
    used, other = tmp_path / "000001_barrier", tmp_path / "mine"
    for path in (tmp_path / "000000_locals", tmp_path / "nccl-Ab3", used, other):
        path.write_bytes(bytes(4096))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        report = Report()
        node_checks.check_shared_memory(report, tmp_path)
    assert report.figures["stale_shared_memory"] == {"files": 2, "bytes": 8192}
    level, message = only(report)
    assert level == "warning"
    assert "000000_locals, nccl-Ab3" in message


def test_a_host_that_does_not_answer_is_named():
    report = Report()
    node_checks.check_hosts(report, [Host("localhost", 1), Host("no-such-host.invalid", 8)])
    level, message = only(report)
    assert level == "error"
    assert message.startswith("no-such-host.invalid: ")
    report = Report()
    node_checks.check_hosts(report, [Host("localhost", 1)])
    assert only(report)[0] == "ok"


@pytest.mark.parametrize(
    ("hashes", "corrupt", "verdict", "why"),
    [
        (["sha1"], False, "ok", "all hashes match"),
        (["sha1"], True, "error", "its sha1 differs from index.json"),
        (None, False, "warning", "1 shards have no hash in index.json"),
    ],
)
def test_shards_of_another_converter_are_hashed_on_request(
    tmp_path, tiny_tokenizer, hashes, corrupt, verdict, why
):
    with streaming.MDSWriter(
        out=str(tmp_path / "set"), columns={"tokens": "ndarray:int32:17"}, hashes=hashes
    ) as writer:
        for number in range(9):
            writer.write({"tokens": np.arange(number, number + 17, dtype=np.int32)})
    if corrupt:
        shard = tmp_path / "set/shard.00000.mds"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    form = f"{{kind: mds_tokens, tokenizer: {tiny_tokenizer}}}"
    changes = [f"data={{path: {tmp_path / 'set'}, format: {form}}}", "model.seq_len=16"]
    report = Report()
    check_data(report, run(*changes), thorough=True)
    row = next(row for row in report.findings if row.subject == "dataset")
    assert row.level == verdict
    assert why in row.message
