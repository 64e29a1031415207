"""Runs that are killed, full disks, and what is left of both: the next start goes on at once."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from runs import PATIENCE_S, curve, finish, gone, launched

from leviathan.checkpoint.layout import complete_checkpoints, verify_manifest
from leviathan.checkpoint.store import load_model

MOMENTS = ("evaluation", "save", "step", "start")
# Often, so that most moments are near one; and no two runs of a test on the same figures by chance.
OFTEN = ("checkpoint.every=4", "train.eval_every=5", "train.log_every=1")


def logged(run_dir):
    """The log's whole lines so far."""
    log = run_dir / "metrics.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def has_come(moment, run_dir, before):
    """Whether a run is now where it shall be killed, having logged `before` lines at its start."""
    log = logged(run_dir)
    if moment == "save":
        return any((run_dir / "checkpoints").glob(".saving-step-*[1-9]*"))  # not the rehearsal
    if moment == "step":
        return len(log) > before
    if moment == "evaluation":
        return len(log) > before and "loss" in log[-1] and log[-1]["step"] % 5 == 0
    return True


def kill_at(moment, run_dir, process, chance):
    """SIGKILL to the launcher and every rank, shortly after `moment`; what was going on then."""
    before = len(logged(run_dir))
    deadline = time.monotonic() + PATIENCE_S
    while not has_come(moment, run_dir, before):
        if process.poll() is not None:
            return None  # it was through sooner
        assert time.monotonic() < deadline, f"{moment} never came"
        time.sleep(0.002)
    # A start takes seconds, a step or a save of this model milliseconds.
    time.sleep(chance.uniform(0, 12 if moment == "start" else 0.05))
    if process.poll() is not None:
        return None
    ranks = children_of(process.pid)
    for pid in [process.pid, *ranks]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    while not all(gone(pid) for pid in ranks):
        time.sleep(0.01)
    folder = run_dir / "checkpoints"
    return {
        "moment": moment,
        "logged": len(logged(run_dir)),
        "drafts": len(list(folder.glob(".saving-*"))) if folder.is_dir() else 0,
        "goes on from": max((p.name for p in complete_checkpoints(run_dir)), default="the start"),
    }


def children_of(pid):
    """A process's children and their children."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    children = [int(word) for word in listed.stdout.split()]
    return [each for child in children for each in (child, *children_of(child))]


def killed_again_and_again(run_file, launcher, kills, seed, *overrides):
    """Kills a run `kills` times and then lets it end; a row a kill."""
    run_dir = run_file.parent / f"killed-{launcher}-{kills}"
    chance, table = random.Random(seed), []
    while len(table) < kills:
        moment = MOMENTS[len(table) % len(MOMENTS)]
        with launched(launcher, run_file, f"run_dir={run_dir}", *OFTEN, *overrides) as process:
            row = kill_at(moment, run_dir, process, chance)
            if row is None:
                _, errors = finish(process)
                assert process.returncode == 0, errors
                break
            table.append(row)
    with launched(launcher, run_file, f"run_dir={run_dir}", *OFTEN, *overrides) as process:
        status, errors = finish(process)
    assert status == 0, errors
    return run_dir, table


def assert_same_run(one, other):
    assert curve(one) == curve(other)
    model, reference = load_model(one)[0], load_model(other)[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name


def show(table):
    print(f"\n{'kill':>5}  {'moment':12}{'lines logged':>13}{'drafts':>8}  goes on from")
    for number, row in enumerate(table, start=1):
        moment, logged, drafts, source = row.values()
        print(f"{number:>5}  {moment:12}{logged:>13}{drafts:>8}  {source}")


def test_a_run_killed_at_random_moments_ends_as_if_undisturbed(run_file):
    """Both runs at the same time: neither is in the other's way."""
    engine, undisturbed = "engine.kind=fsdp2", run_file.parent / "unkilled-alone"
    with launched("alone", run_file, f"run_dir={undisturbed}", *OFTEN, engine) as process:
        killed, table = killed_again_and_again(run_file, "alone", 3, 3, engine)
        status, errors = finish(process)
    assert status == 0, errors
    show(table)
    assert_same_run(killed, undisturbed)


# Another user, who may read what is root's (the program may lie there), but write nothing of it.
READS = "-all,+dac_read_search"
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
NOBODY += (f"--inh-caps={READS}", f"--ambient-caps={READS}", f"--bounding-set={READS}")


def test_two_users_at_once_after_a_run_that_was_killed(run_file, tiny_dataset):
    """Nothing outside a run's folder is shared: neither the dead nor the other is in the way."""
    version = subprocess.run([*NOBODY, sys.executable, "-V"], cwd="/", check=False)
    if os.getuid() or version.returncode:
        pytest.skip("may not become another user, or that one cannot read the program")
    with tempfile.TemporaryDirectory(prefix="leviathan-two-users-") as folder:
        data = f"data.path={shutil.copytree(tiny_dataset, f'{folder}/data')}"
        few = ("train.steps=8", "optim.warmup_steps=1", "engine.kind=fsdp2", data)
        public = shutil.copy(run_file, folder)
        (Path(folder) / "theirs").mkdir()
        for path in (folder, f"{folder}/theirs"):
            os.chown(path, 65534, 65534)
        ours, theirs = (f"run_dir={folder}/{name}/run" for name in ("ours", "theirs"))
        before = set(Path("/dev/shm").iterdir())
        with launched("torchrun", public, ours, *few) as process:
            row = kill_at("step", Path(folder) / "ours/run", process, random.Random(1))
        assert row is not None
        home = f"HOME={folder}"
        with (
            launched("torchrun", public, ours, *few) as first,
            launched("torchrun", public, theirs, *few, prefix=[*NOBODY, "env", home]) as second,
        ):
            for process in (first, second):
                status, errors = finish(process)
                assert status == 0, errors
        assert curve(Path(folder) / "ours/run") == curve(Path(folder) / "theirs/run")
        assert set(Path("/dev/shm").iterdir()) <= before


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_two_ranks_killed_a_dozen_times_end_as_if_undisturbed(run_file, engine):
    chosen = (f"engine.kind={engine}", "train.steps=80", "checkpoint.keep_every=40")
    undisturbed = run_file.parent / f"unkilled-{engine}"
    with launched("torchrun", run_file, f"run_dir={undisturbed}", *OFTEN, *chosen) as process:
        status, errors = finish(process)
    assert status == 0, errors
    killed, table = killed_again_and_again(run_file, "torchrun", 12, 5, *chosen)
    show(table)
    assert len(table) == 12, "the run was through too soon"
    assert_same_run(killed, undisturbed)


# ---------------------------------------------------------------- disks


@contextmanager
def small_disk(at):
    """A file system of 1 MB."""
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(at)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_disk_that_fills_up_is_one_message_and_the_former_checkpoints_stay(run_file, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        run_dir = disk / "run"
        settings = (f"run_dir={run_dir}", "engine.kind=fsdp2", "checkpoint.every=4")
        keep = "checkpoint.keep_last=9"
        with launched("deepspeed", run_file, *settings, keep) as process:
            status, errors = finish(process)
        assert status == 2, errors
        assert "the checkpoints to be kept at once will take" in errors  # a warning, beforehand
        assert errors.count("error:") == 1, errors
        assert "could not be saved" in errors
        assert "Traceback" not in errors
        saved = complete_checkpoints(run_dir)
        assert saved
        for directory in saved:
            verify_manifest(directory)
        assert not list((run_dir / "checkpoints").glob(".saving-*"))

        # With room made, the same command goes on.
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        with launched("deepspeed", run_file, *settings, keep) as process:
            status, errors = finish(process)
        assert status == 0, errors
        assert f"Resuming from {saved[-1]}" in errors


def test_a_disk_too_small_for_one_checkpoint_is_told_before_the_first_step(run_file, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        wide = ("model.d_model=64", "engine.kind=fsdp2", f"run_dir={disk / 'run'}")
        with launched("alone", run_file, *wide) as process:
            status, errors = finish(process)
        assert status == 2, errors
        assert "MB are free, but one checkpoint of this model takes" in errors
        assert not list(disk.iterdir())
