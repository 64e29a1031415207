"""Rows of a check one by one, on real files, sockets and processes."""

import mmap
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import streaming

from leviathan.checkpoint.retention import retention
from leviathan.config.load import load_config
from leviathan.config.plan import RunPlan
from leviathan.config.schema import RunConfig
from leviathan.errors import ConfigError, DataError
from leviathan.launch.commands import Request
from leviathan.launch.hosts import Host
from leviathan.model.scale import Hardware
from leviathan.parallel.ports import free_port
from leviathan.preflight import machine
from leviathan.preflight.check import Asked, find_target
from leviathan.preflight.data import check_data
from leviathan.preflight.report import Report, duration, size, table
from leviathan.preflight.run import (
    Target,
    check_checkpoints,
    check_cost,
    check_folder,
    check_memory,
    check_ranks,
)
from leviathan.train.run_dir import occupied

CONFIGS = Path(__file__).parents[3] / "configs"


def run(*changes, name="pile_400m"):
    return load_config(CONFIGS / f"run/{name}.yaml", changes, RunConfig)


def only(report):
    (row,) = report.rows
    return row.verdict, row.why


def test_the_worst_row_is_the_verdict_and_an_error_is_a_red_row():
    report = Report()
    assert report.verdict == "green"
    report.say("one", "amber", "look [here]")
    assert report.verdict == "amber"
    with report.about("two"):
        raise DataError("data.broken", "mend it")
    report.say("three", "green", "well")
    assert report.verdict == "red"
    shown = table(report.as_dict())
    assert "look [here]" in shown  # not read as markup
    assert "mend it" in shown
    assert shown.endswith("1 green, 1 amber, 1 red. Not ready: mend the red rows first.")


def test_sizes_and_times_as_people_read_them():
    assert [size(n) for n in (1500, 2e6, 3.21e9, 4e12)] == [
        "1.5 kB", "2.00 MB", "3.21 GB", "4.00 TB"
    ]  # fmt: skip
    assert [duration(s) for s in (3, 90, 5400, 86400)] == [
        "3.0 s", "1.5 minutes", "1.5 hours", "1.0 days"
    ]  # fmt: skip


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


def test_uneven_ranks_are_amber_and_impossible_ones_red():
    report = Report()
    check_ranks(report, run(), 8)
    assert only(report)[0] == "green"
    report = Report()
    check_ranks(report, run("train.global_batch_size=9", "train.micro_batch_size=2"), 8)
    verdict, why = only(report)
    assert verdict == "amber"
    assert "44% of the work is filling" in why  # 16 rows are computed for 9
    with pytest.raises(ConfigError, match="does not divide the 7 ranks"):
        check_ranks(Report(), run("parallel.tp=2", "model.embedding.tp=ids"), 7)


def test_time_is_flops_over_the_stated_share_of_the_peak():
    plan, report = RunPlan(run(), 8), Report()
    hardware = Hardware(flops=1e15, mfu=0.5)
    check_cost(report, plan, Target("made up", "cuda", hardware, assumed=False))
    assert only(report)[0] == "green"
    tokens = 32_000 * 512 * 512
    assert report.figures["tokens"] == tokens
    flops = tokens * 2_533_668_864
    assert report.figures["seconds"] == pytest.approx(flops / (8 * 0.5e15), rel=0.01)
    hours = report.figures["seconds"] * 8 / 3600
    assert report.figures["device_hours"] == pytest.approx(hours)


@pytest.mark.parametrize(("room", "verdict"), [(20e9, "green"), (12e9, "amber"), (9e9, "red")])
def test_memory_is_held_against_the_device(room, verdict):
    report = Report()
    target = Target("made up", "cuda", Hardware(memory_bytes=room), assumed=False)
    check_memory(report, RunPlan(run(), 8), target)
    assert only(report)[0] == verdict
    held = report.figures["memory"]
    parts = {k: v for k, v in held.items() if k not in ("total", "moment", "device_bytes")}
    assert sum(parts.values()) == held["total"]
    assert ("engine.activation_checkpointing=true" in only(report)[1]) == (verdict == "red")


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
    assert only(report)[0] == "red"
    assert str(tmp_path) in only(report)[1]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_where_a_run_is_at_work_is_refused(tmp_path):
    config = run(f"run_dir={tmp_path / 'run'}")
    report = Report()
    check_folder(report, config, None)
    assert only(report)[0] == "green"
    with occupied(config.run_dir, Alone()), pytest.raises(ConfigError, match="is training there"):
        check_folder(Report(), config, None)


class Alone:
    """As much of a mesh as a run of one rank needs to take its folder."""

    rank = 0
    together = staticmethod(nullcontext)


def test_devices_by_name_and_by_figures():
    request = Request(("run.yaml",), "deepspeed", ranks=2)
    assert find_target(Asked(request, 2, "h200")).hardware.memory_bytes == 141e9
    own = find_target(Asked(request, 2, "a100", memory_gb=40, peak_tflops=100)).hardware
    assert (own.memory_bytes, own.flops) == (40e9, 100e12)
    with pytest.raises(ConfigError, match=r"--device h1: not known.*h100"):
        find_target(Asked(request, 2, "h1"))


def test_a_port_that_is_taken_names_its_holder():
    report, port = Report(), free_port()
    machine.check_port(report, port, ())
    assert only(report) == ("green", f"{port} is free")
    with socket.create_server(("", port)):
        report = Report()
        machine.check_port(report, port, ())
    verdict, why = only(report)
    assert verdict == "red"
    assert "choose another --port" in why


def test_shared_memory_that_nobody_uses_is_stale(tmp_path):
    used, other = tmp_path / "000001_barrier", tmp_path / "mine"
    for path in (tmp_path / "000000_locals", tmp_path / "nccl-Ab3", used, other):
        path.write_bytes(bytes(4096))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        report = Report()
        machine.check_shared_memory(report, tmp_path)
    assert report.figures["stale_shared_memory"] == {"files": 2, "bytes": 8192}
    verdict, why = only(report)
    assert verdict == "amber"
    assert "000000_locals, nccl-Ab3" in why


def test_a_host_that_does_not_answer_is_named():
    report = Report()
    machine.check_hosts(report, [Host("localhost", 1), Host("no-such-host.invalid", 8)])
    verdict, why = only(report)
    assert verdict == "red"
    assert why.startswith("no-such-host.invalid: ")
    report = Report()
    machine.check_hosts(report, [Host("localhost", 1)])
    assert only(report)[0] == "green"


@pytest.mark.parametrize(
    ("hashes", "damaged", "verdict", "why"),
    [
        (["sha1"], False, "green", "every byte as it was written"),
        (["sha1"], True, "red", "its sha1 differs from index.json"),
        (None, False, "amber", "1 shards have no hash in index.json"),
    ],
)
def test_shards_of_another_converter_are_hashed_on_request(
    tmp_path, tiny_tokenizer, hashes, damaged, verdict, why
):
    with streaming.MDSWriter(
        out=str(tmp_path / "set"), columns={"tokens": "ndarray:int32:17"}, hashes=hashes
    ) as writer:
        for number in range(9):
            writer.write({"tokens": np.arange(number, number + 17, dtype=np.int32)})
    if damaged:
        shard = tmp_path / "set/shard.00000.mds"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    form = f"{{kind: mds_tokens, tokenizer: {tiny_tokenizer}}}"
    changes = [f"data={{path: {tmp_path / 'set'}, format: {form}}}", "model.seq_len=16"]
    report = Report()
    check_data(report, run(*changes), thorough=True)
    row = next(row for row in report.rows if row.what == "dataset")
    assert row.verdict == verdict
    assert why in row.why
