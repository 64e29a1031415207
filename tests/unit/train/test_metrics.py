import json
import math

import psutil
import pytest
from errors import raises_error

from leviathan.engine.base import StepStats
from leviathan.train.metrics import Metrics
from leviathan.train.metrics_log import rewind
from leviathan.train.step_timer import CpuLoad, CpuTimes


def metrics(path, step=0, tokens=0):
    return Metrics(path, step, tokens, 0, flops_per_token=6.0, world_size=1, writes=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_keys_that_scripts_rely_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics(path)
    stats = StepStats(loss=2.5, grad_norm=0.5, tokens=100, skipped=False)
    log.add(stats)
    log.log(1, stats, lr=0.1)
    (line,) = lines(path)
    assert line.keys() >= {
        *("step", "tokens", "loss", "grad_norm", "lr"),
        *("tokens_per_s", "mfu", "data_wait_s", "skipped"),
    }
    assert (line["step"], line["tokens"], line["loss"]) == (1, 100, 2.5)
    assert line["tokens_per_s"] > 0


def test_skipped_steps_are_counted_and_their_loss_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics(path)
    bad = StepStats(loss=math.nan, grad_norm=math.inf, tokens=10, skipped=True)
    good = StepStats(loss=1.0, grad_norm=1.0, tokens=10, skipped=False)
    for stats in (bad, bad):
        log.add(stats)
    assert log.skipped_in_a_row == 2
    log.log(2, bad, lr=0.1)
    log.add(good)
    assert (log.skipped, log.skipped_in_a_row) == (2, 0)
    assert lines(path)[0]["loss"] is None
    assert lines(path)[0]["skipped"] == 2


def test_steps_done_anew_stand_there_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "val_loss": 1}\n{"step": 3}\n{"step": 4, "lo')
    rewind(path, 2)
    assert [line["step"] for line in lines(path)] == [1, 2]
    rewind(path, 0)
    assert path.read_text() == ""


def test_lines_that_are_none_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'[1]\n\xff\n{"no": 1}\n{"step": 1}')
    rewind(path, 2)
    assert path.read_text() == '{"step": 1}\n'


def test_a_full_disk_is_one_message(tmp_path):
    log = metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with raises_error("metrics.not_writable", "metrics.jsonl"):
        log.write(step=1)


def test_only_the_first_rank_writes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9}\n')
    Metrics(path, 0, 0, 0, flops_per_token=6.0, world_size=2, writes=False).write(step=1)
    assert path.read_text() == '{"step": 9}\n'


def test_mfu_in_both_conventions_by_hand(tmp_path, monkeypatch):
    clock = iter([10.0, 11.0, 14.0, 14.0, 14.0, 14.0, 14.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    path = tmp_path / "metrics.jsonl"
    log = Metrics(
        path, 0, 0, 0, 60.0, 2, True, steps=5, six_n_flops_per_token=30.0, peak_flops=1000.0
    )
    stats = StepStats(loss=2.0, grad_norm=1.0, tokens=100, skipped=False)
    log.add(stats)  # at 11 s
    log.add(stats)
    log.log(2, stats, lr=0.1)  # at 14 s: 200 tokens in 4 s, 100 in the 3 s since the first step
    (line,) = lines(path)
    assert line["tokens_per_s"] == 50
    assert line["tokens_per_s_per_rank"] == 25
    assert line["peak_flops"] == 2000
    assert line["mfu"] == pytest.approx(50 * 60 / 2000)
    assert line["mfu_6n"] == pytest.approx(50 * 30 / 2000)
    assert line["eta_s"] == pytest.approx(3 * 100 / (100 / 3))


def test_the_time_of_a_save_is_told_and_is_not_training_time(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 5.0, 5.0, 5.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    log = metrics(tmp_path / "metrics.jsonl")
    with log.exclude_from_throughput(saving=True):
        pass
    log.tokens += 100
    log.log(1, StepStats(1.0, 1.0, 100, False), lr=0.1)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["checkpoint_s"] == 3
    assert line["tokens_per_s"] == pytest.approx(100 / 2)


def test_a_profiled_step_counts_for_no_speed(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    log, stats = metrics(tmp_path / "metrics.jsonl"), StepStats(1.0, 1.0, 100, False)

    def step(seconds, profiled):
        with log.exclude_from_throughput(profiled):
            now[0] += seconds
        log.add(stats, timed=not profiled)

    for seconds, profiled in ((1, False), (60, True), (1, False)):
        step(seconds, profiled)
    assert log.steady_tokens_per_s == pytest.approx(100)
    log.log(3, stats, lr=0.1)
    step(60, True)
    log.log(4, stats, lr=0.1)
    step(1, False)
    log.log(5, stats, lr=0.1)
    mixed, only, plain = lines(tmp_path / "metrics.jsonl")
    assert (mixed["tokens"], mixed["tokens_per_s"], mixed["profiled_steps"]) == (300, 100, 1)
    assert (only["tokens_per_s"], only["mfu"], only["profiled_steps"]) == (None, None, 1)
    assert plain["tokens_per_s"] == 100
    assert "profiled_steps" not in plain


def test_a_line_says_how_busy_the_machine_was(tmp_path):
    log = metrics(tmp_path / "metrics.jsonl")
    cores = psutil.cpu_count() or 1
    reads = iter(CpuTimes(10 * cores * n, 2 * cores * n, 5 * cores * n) for n in range(3))
    log.load = CpuLoad([1], lambda pids: next(reads))
    log.log(1, StepStats(1.0, 1.0, 100, False), lr=0.1)
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["cpu_busy"] == pytest.approx(0.8)
    assert line["cpu_others"] == pytest.approx(0.3)


def test_the_note_shows_a_smoothed_loss(tmp_path):
    log = metrics(tmp_path / "metrics.jsonl")
    for loss in (4.0, 2.0):
        log.add(StepStats(loss, 1.0, 10, False))
    note = log.note(StepStats(2.0, 1.0, 10, False))
    assert note.startswith("smoothed loss 3.9000 · ")
    assert "tokens/s" in note
