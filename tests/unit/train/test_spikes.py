import json
import math
import random

from leviathan.engine.base import StepStats
from leviathan.train.metrics import MIN_LOSSES, WINDOW, Metrics, spike_threshold
from leviathan.train.metrics_log import logged_losses


def falling(steps, noise=0.05, seed=1):
    chance = random.Random(seed)
    return [4 + 6 * math.exp(-step / 200) + chance.gauss(0, noise) for step in range(steps)]


def test_a_falling_noisy_loss_has_no_spikes_and_a_jump_is_one():
    losses = falling(2000)
    for step in range(MIN_LOSSES, len(losses)):
        assert losses[step] <= spike_threshold(losses[:step], 6), step
    assert losses[-1] + 1 > spike_threshold(losses, 6)


def test_by_hand():
    # Median 10, absolute deviations 2, 1, 0, 1, 2, …: their median 1.
    losses = [8.0, 9.0, 10.0, 11.0, 12.0] * 10
    assert spike_threshold(losses, 6) == 10 + 6 * 1.4826
    assert spike_threshold([10.0] * 50, 6) == 10 + 6 * 0.1  # the floor
    assert spike_threshold([1000.0, *losses * 2], 6) == 10 + 6 * 1.4826  # out of the window
    assert len(losses * 2) == WINDOW


def test_nothing_is_said_too_soon_or_when_off():
    assert spike_threshold([1.0] * (MIN_LOSSES - 1), 6) == math.inf
    assert spike_threshold([1.0] * 50, 0) == math.inf


def test_earlier_spikes_hide_no_later_one():
    losses = falling(200)
    clean = spike_threshold(losses, 6)
    spiky = spike_threshold([*losses[:-20], *[50.0 if i % 4 == 0 else 4 for i in range(20)]], 6)
    assert spiky < clean + 2


def test_a_spike_is_logged_and_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = Metrics(path, 0, 0, 0, 6.0, 1, writes=True, losses=[3.0, 2.0])
    stats = StepStats(9.0, 1.0, 10, False)
    log.log(1, stats, 0.1, [7, 8])
    log.log(2, StepStats(math.nan, 1.0, 10, True), 0.1)
    log.write(step=2, val_loss=1.0)
    assert list(log.losses) == [3.0, 2.0, 9.0]
    first, second, _ = map(json.loads, path.read_text().splitlines())
    assert first["spike_rows"] == [7, 8]
    assert "spike_rows" not in second
    assert logged_losses(path, 2) == [9.0]
    assert logged_losses(path, 0) == []
